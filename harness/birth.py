"""Birth of a run: layout and version 0 from a program, into a run directory."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from fragments.layout import Layout
from fragments.runspec import RunSpec
from fragments.tree import TreeCodec
from harness.programs import load_program
from learner.member import layout_of
from outer_server.store.rundir import create_run


@dataclass(frozen=True, slots=True)
class Birth:
    """What was written: the completed settings and the layout of version 0."""

    path: Path
    spec: RunSpec
    layout: Layout


def give_birth(path: Path, spec: RunSpec, data: str | None) -> Birth:
    """Builds the program's fresh parameters from `spec.seed` and writes the run directory.

    A run id is made up where `spec` has none; the program's identity and the digest of its data
    are filled in. Everything else is written as it stands.

    Raises:
        RunDirectoryError: when `path` already holds a run or cannot be written.
        SettingsError, DataError, LayoutError: when no program or no layout comes of the settings.
    """
    program = load_program(spec, data)
    spec = spec.model_copy(
        update={
            "run_id": spec.run_id or make_run_id(),
            "program": spec.program.model_copy(
                update={
                    "identity": program.identity,
                    "data_digest": str(getattr(program, "data_digest", "")),
                }
            ),
        }
    )
    params = program.init_params(spec.seed)
    layout = layout_of(program, params, spec)
    codec = TreeCodec(layout, params)
    blocks = [np.asarray(codec.pack(p, params)) for p in range(len(layout.fragments))]
    create_run(path, spec, layout, blocks)
    return Birth(path, spec, layout)


def make_run_id() -> str:
    """A name for a run that sorts by time and is told apart from others of the same second."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
