"""Birth of a run: layout and version 0 from a program, into a run directory."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from fragments.layout import Layout
from fragments.runspec import RunSpec
from fragments.tree import TreeCodec
from harness.programs import load_program
from learner.member import layout_of
from outer_server.store.rundir import create_run


@dataclass(frozen=True, slots=True)
class Birth:
    """What a run begins with: completed settings, layout, and version 0 of each fragment.
    `tokens_per_step` are those of one learner.
    """

    spec: RunSpec
    layout: Layout
    values: tuple[Float32[np.ndarray, "B N"], ...]
    tokens_per_step: int

    def write(self, path: Path) -> None:
        """Writes the run directory, all or nothing.

        Raises:
            RunDirectoryError: when `path` already holds something or cannot be written.
        """
        create_run(path, self.spec, self.layout, self.values)


def prepare_birth(spec: RunSpec, data: str | None) -> Birth:
    """Builds the program's fresh parameters from `spec.seed`. Writes nothing.

    A run id is made up where `spec` has none; the program's identity and the digest of its data
    are filled in. Everything else stays as it is.

    Raises:
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
    values = tuple(np.asarray(codec.pack(p, params)) for p in range(len(layout.fragments)))
    return Birth(spec, layout, values, program.tokens_per_step)


def make_run_id() -> str:
    """A name for a run that sorts by time and is told apart from others of the same second."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
