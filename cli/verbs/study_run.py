"""`diloco study run`: makes the missing cells of a study, and its tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cli.keys import Positional, VerbSettings
from cli.stop import stop_on_signal
from cli.verb import Verb
from fragments.errors import DilocoError


class StudyRunSettings(VerbSettings):
    """Which study, and where its results go."""

    study_file: Annotated[Path, Positional] = Field(description="TOML file of the study")
    out: Path = Field(
        default=Path("docs/results"), description="directory of cells, tables and pictures"
    )
    workers: int | None = Field(
        default=None, ge=1, le=256, description="processes at once; without it, one a core"
    )


def run(settings: StudyRunSettings) -> None:
    """Makes what is missing, with a line for every cell, and prints the table.

    Raises:
        KeyboardInterrupt: when it was stopped before all was made; what is finished is kept.
        DilocoError: after the table, when a cell could not be made or is damaged.
    """
    from simulation.study.matrix import load_study

    study = load_study(settings.study_file)
    with stop_on_signal() as stop:
        from harness.study import StudyRun
        from simulation.study.table import markdown

        command = f"diloco study run {settings.study_file}"
        made = StudyRun(study, settings.out, command, _say, settings.workers).run(stop)
        if made.is_stopped:
            _say("what is finished is kept; the same command goes on from here")
            raise KeyboardInterrupt
    if made.tables is not None:
        print(markdown(made.tables.headline))
    if made.faults:
        for line in made.faults:
            _say(line)
        raise DilocoError(
            f"cells that are not in the table: {len(made.faults)}; the lines above say why"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


VERB = Verb(
    name="study run",
    summary="run a matrix of simulated runs, and make its tables",
    details=(
        "Run a study: a matrix of simulated runs, each with real training on a virtual clock. Its\n"
        "TOML file says rows and seeds. Cells that are finished already are kept, so the command\n"
        "goes on where it was stopped. Tables and pictures are written beside the cells.\n"
        "Exit code 130 when it was stopped before the end, 1 when a cell could not be made or is\n"
        "damaged; the table is of all others then."
    ),
    examples="examples:\n  diloco study run studies/headline.toml\n"
    "  diloco study run studies/rates_short.toml --workers 1 --out runs/mine",
    settings=StudyRunSettings,
    run=run,
)
