"""`diloco study check`: makes a recorded cell again and compares."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cli.keys import Positional, VerbSettings
from cli.verb import Verb
from fragments.errors import DilocoError


class StudyCheckSettings(VerbSettings):
    """Which cell."""

    row: Annotated[str, Positional] = Field(description="the row's name")
    seed: Annotated[int, Positional] = Field(description="the seed")
    from_study: str | None = Field(
        default=None,
        description="name of the study; without it headline, where several have such a row",
    )
    out: Path = Field(default=Path("docs/results"), description="directory of the cells")
    json_: bool = Field(default=False, alias="json", description="print the result as JSON")


def run(settings: StudyCheckSettings) -> None:
    """Prints what was found.

    Raises:
        DilocoError: when the cell is not as recorded (`Check.fault`), after printing.
    """
    from harness.study_check import check_cell

    found = check_cell(settings.row, settings.seed, settings.out, settings.from_study)
    if settings.json_:
        print(json.dumps({key: _sayable(value) for key, value in asdict(found).items()}, indent=2))
    else:
        same = "the same weights, to the bit" if found.digest_equal else "OTHER weights"
        print(
            f"{found.study}/{found.row} seed {found.seed}: {same}; loss {found.loss:.6f}, recorded"
            f" {found.loss_recorded:.6f} ({found.wall_s:.0f} s)"
        )
    if found.fault is not None:
        raise DilocoError(found.fault)


def _sayable(value: object) -> object:
    """JSON has no word for a diverged run's loss: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


VERB = Verb(
    name="study check",
    summary="run a recorded cell of a study again and compare",
    details=(
        "Run a recorded cell of a study again, and compare its weights and loss with the record.\n"
        "Exit code 1 when the weights differ on a processor with the recorded instruction set; on\n"
        "another, where compiled code may round differently, when the losses differ by over 1%."
    ),
    examples="examples:\n  diloco study check decoupled_equal 0\n"
    "  diloco study check data_parallel 3 --json",
    settings=StudyCheckSettings,
    run=run,
)
