"""`diloco study table`: makes the tables of a study from what is finished of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cli.keys import Positional, VerbSettings
from cli.verb import Verb
from fragments.errors import DilocoError


class StudyTableSettings(VerbSettings):
    """Which study, and where its cells are."""

    study_file: Annotated[Path, Positional] = Field(description="TOML file of the study")
    out: Path = Field(
        default=Path("docs/results"), description="directory of cells, tables and pictures"
    )
    json_: bool = Field(default=False, alias="json", description="print JSON, not Markdown")


def run(settings: StudyTableSettings) -> None:
    """Writes tables and pictures, and prints the table.

    Raises:
        DilocoError: after the table, when a cell is damaged and so not in it.
    """
    from harness.study_tables import write_tables
    from simulation.study.matrix import load_study
    from simulation.study.table import markdown

    made = write_tables(load_study(settings.study_file), settings.out)
    headline = made.headline
    print(headline.model_dump_json(indent=1) if settings.json_ else markdown(headline))
    if made.damaged:
        for line in made.damaged:
            print(line, file=sys.stderr)
        count = len(made.damaged)
        raise DilocoError(f"damaged cells that are not in the table: {count}, named above")


VERB = Verb(
    name="study table",
    summary="make the tables of a study from its finished cells",
    details=(
        "Make the tables and pictures of a study from the cells that are finished. Runs none.\n"
        "Exit code 1 when a cell is damaged; it is named, and the table is of all others."
    ),
    examples="examples:\n  diloco study table studies/headline.toml --json",
    settings=StudyTableSettings,
    run=run,
)
