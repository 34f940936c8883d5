"""`diloco chaos`: kill, stop and cut off the processes of a run, and prove that nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from cli.measure import MeasureSettings, measure
from cli.verb import Verb
from fragments.errors import DilocoError

if TYPE_CHECKING:
    from harness.chaos.result import ChaosResult


class ChaosSettings(MeasureSettings):
    """What happens, how often, and to what run."""

    server_kills: int = Field(
        default=10, ge=0, le=10_000, description="kill -9 of the server at random instants"
    )
    learner_kills: int = Field(
        default=4, ge=0, le=10_000, description="kill -9 of a learner at random instants"
    )
    point_kills: int = Field(
        default=0,
        ge=0,
        le=100,
        description="times that the server kills itself at each named point: before and after each"
        " kind of durable write, between applying and acknowledging, in mid-snapshot",
    )
    learner_stops: int = Field(
        default=0, ge=0, le=1000, description="SIGSTOP of a learner beyond its lease, then SIGCONT"
    )
    server_away_s: float = Field(
        default=0.0, ge=0, le=3600, description="once, the server is away for so many seconds"
    )
    learners: int = Field(default=3, ge=1, le=16, description="number of learners")
    pace_s: float = Field(default=0.1, gt=0, description="least seconds a step of a learner takes")
    tokens_per_fault: int = Field(
        default=46_000,
        ge=1,
        description="trained tokens of all learners from one fault to the next; the run's budget"
        " follows from it",
    )
    compare: bool = Field(
        default=False, description="do the same run without faults first, and compare the loss"
    )
    seed: int = Field(default=0, ge=0, description="of the schedule; the same for the same seed")
    data: str | None = Field(
        default=None,
        min_length=1,
        description="text or JSONL files to train on; without it, some of the source of Python's"
        " standard library",
    )
    wall_limit_s: float = Field(
        default=7200.0, gt=0, description="end a run that is not finished by then"
    )


def run(settings: ChaosSettings) -> None:
    """Does it all and prints the result.

    Raises:
        DilocoError: when a promise is broken, after printing the result; or when the run could not
            be finished.
    """

    def bench(out: Path, stop: threading.Event, tell: Callable[[str], None]) -> ChaosResult:
        from harness.chaos.plan import ChaosPlan, small_data, small_spec
        from harness.chaos.run import Chaos
        from harness.chaos.schedule import Faults

        faults = Faults(
            server_kills=settings.server_kills,
            point_kills=settings.point_kills,
            server_away_s=settings.server_away_s,
            learner_kills=settings.learner_kills,
            learner_stops=settings.learner_stops,
        )
        plan = ChaosPlan(
            out=out,
            spec=small_spec(),
            faults=faults,
            seed=settings.seed,
            learners=settings.learners,
            pace_s=settings.pace_s,
            tokens_per_fault=settings.tokens_per_fault,
            data=settings.data or small_data(),
            compare=settings.compare,
            wall_limit_s=settings.wall_limit_s,
        )
        return Chaos(plan, stop, tell).run()

    def show(result: ChaosResult) -> None:
        from harness.chaos.report import report

        print(report(result))

    result = measure(settings, bench, show)
    if result is not None and not result.holds:
        raise DilocoError(f"a promise is broken: {result.findings[0]}")


VERB = Verb(
    name="chaos",
    summary="kill the processes of a run and prove that nothing is lost",
    details=(
        "Kill the processes of a run and prove that nothing is lost: a server and its learners\n"
        "run on this machine, a seeded schedule kills them with -9, stops them and keeps them\n"
        "away, they are started again, and the run goes on to its end. Then a referee compares\n"
        "the receipts that the learners kept with the server's tape, runs the tape again from the\n"
        "run's birth, and compares the digest of every version. Exit code 1 if anything that was\n"
        "acknowledged is missing, counts twice, or has other bits.\n\n"
        "A fault falls somewhere in a stretch of its own of the token budget. Where a process\n"
        "takes longer than that to come back, training is held until it has. Only processes that\n"
        "the command itself has started are touched."
    ),
    examples=(
        "examples:\n"
        "  diloco chaos\n"
        "  diloco chaos --server-kills 100 --learner-kills 100 --compare --json\n"
        "  diloco chaos --server-kills 0 --learner-kills 0 --point-kills 1 --out runs/points\n"
        "  diloco chaos --server-kills 0 --learner-stops 2 --server-away-s 60"
    ),
    settings=ChaosSettings,
    run=run,
)
