"""`diloco study table`: makes the tables of a study from what is finished of it."""

from __future__ import annotations

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
        SettingsError: where no cell is finished, or the tables there are another study's.
        DilocoError: for cells that are not what was written, after printing the rest.
    """
    from harness.study import write_tables
    from simulation.study.matrix import load_study
    from simulation.study.table import markdown

    headline, damaged = write_tables(load_study(settings.study_file), settings.out)
    print(headline.model_dump_json(indent=1) if settings.json_ else markdown(headline))
    if damaged:
        raise DilocoError("cells that are left out: " + "; ".join(damaged))


VERB = Verb(
    name="study table",
    summary="make the tables of a study from its finished cells",
    details="Make the tables and pictures of a study from the cells that are finished. Runs none.",
    examples="examples:\n  diloco study table studies/headline.toml --json",
    settings=StudyTableSettings,
    run=run,
)
