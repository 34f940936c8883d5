"""`diloco export`: the newest weights of a run as one safetensors file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cli.keys import Positional, VerbSettings
from cli.verb import Verb
from fragments.errors import DilocoError, RunDirectoryError, SettingsError


class ExportSettings(VerbSettings):
    """Which run, and where to."""

    run_dir: Annotated[Path, Positional] = Field(description="directory that `diloco init` made")
    out: Annotated[Path, Positional] = Field(description="file to write, NAME.safetensors")
    force: bool = Field(default=False, description="replace a file that is there")
    despite_damage: bool = Field(
        default=False, description="write what the journal has up to its first damaged record"
    )


def run(settings: ExportSettings) -> None:
    """Writes the file.

    Raises:
        SettingsError: when there is a file already, or it is named otherwise.
        RunDirectoryError: when the run is being served, or cannot be read.
    """
    if settings.out.is_dir():
        raise SettingsError(f"{settings.out} is a directory: name a file")
    if settings.out.suffix != ".safetensors":
        raise SettingsError(f"{settings.out}: the file's name must end with .safetensors")
    if settings.out.exists() and not settings.force:
        raise SettingsError(f"{settings.out} exists: name another file, or replace it with --force")
    if not settings.out.parent.is_dir():
        raise SettingsError(f"{settings.out.parent} is no directory: make it first")
    from harness.environment import use_server_arithmetic

    use_server_arithmetic(os.environ)
    from fragments.disk import REAL_DISK
    from outer_server.history import newest
    from outer_server.store.values import write_weights

    found = newest(settings.run_dir)
    state, layout = found.state, found.parameters.layout
    if found.damage and not settings.despite_damage:
        raise RunDirectoryError(
            f"the journal of {settings.run_dir} is damaged ({found.damage}): what can be had are"
            f" the weights of step {state.global_step}; --despite-damage writes those"
        )
    versions = [fragment.version for fragment in state.fragments]
    words = {
        "run_id": state.spec.run_id,
        "epoch": str(state.epoch),
        "versions": ",".join(map(str, versions)),
        "global_step": str(state.global_step),
        "tokens_trained": str(state.tokens_trained),
    }
    try:
        write_weights(REAL_DISK, settings.out, layout, found.parameters.fragments, words)
    except OSError as error:
        raise DilocoError(f"{settings.out} cannot be written: {error.strerror}") from error
    size = settings.out.stat().st_size
    print(
        f"{settings.out}: {layout.num_values} parameters, {size} bytes, step {state.global_step}, "
        f"versions {min(versions)} to {max(versions)} of epoch {state.epoch}"
    )


VERB = Verb(
    name="export",
    summary="write a run's newest weights to one safetensors file",
    details=(
        "Write the newest global weights of a stopped run, by tensor path, to one safetensors\n"
        "file. They are the newest snapshot's and what the journal has after it. While the run is\n"
        "served, take the file weights.safetensors of its newest snapshot. The run directory may\n"
        "be one that cannot be written."
    ),
    examples=(
        "examples:\n"
        "  diloco export runs/mine mine.safetensors\n\n"
        "exit codes: 2 the file is there already, or is not named so; 5 run directory, or its\n"
        "journal is damaged"
    ),
    settings=ExportSettings,
    run=run,
)
