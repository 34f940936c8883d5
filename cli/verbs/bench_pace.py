"""`diloco bench pace`: do slow learners slow the fast ones?"""

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
    from harness.pace import PaceResult


class BenchPaceSettings(MeasureSettings):
    """How often, how long and how fast."""

    pairs: int = Field(
        default=7, ge=1, le=50, description="windows with and without the slow learners"
    )
    window_s: float = Field(default=10.0, ge=2, le=120, description="seconds of each window")
    pace_s: float = Field(
        default=0.22, gt=0, description="least seconds a step of a fast learner takes"
    )
    slow_factor: float = Field(
        default=3.0, gt=1, description="a slow one takes so many times longer"
    )
    fast_learners: int = Field(default=2, ge=1, le=8, description="that stay")
    slow_learners: int = Field(default=1, ge=1, le=8, description="that come and go")
    synchronous: bool = Field(
        default=False,
        description="measure synchronous DiLoCo (K = M) too, where fast learners wait",
    )


def run(settings: BenchPaceSettings) -> None:
    """Measures and prints the rates and their ratio.

    Raises:
        DilocoError: when the median ratio is not within 2% of 1, after printing it.
    """

    def bench(out: Path, stop: threading.Event, tell: Callable[[str], None]) -> PaceResult:
        from harness.pace import PaceBench, PacePlan, measure_both

        plan = PacePlan(
            out=out,
            pairs=settings.pairs,
            window_s=settings.window_s,
            pace_s=settings.pace_s,
            slow_factor=settings.slow_factor,
            fast=settings.fast_learners,
            slow=settings.slow_learners,
        )
        if settings.synchronous:
            return measure_both(plan, stop, tell)
        return PaceBench(plan, stop, tell).run()

    def show(result: PaceResult) -> None:
        slow = "a slow one" if result.slow == 1 else f"{result.slow} slow ones"
        print(f"fast learners' step rate with {slow} beside them, over that without:")
        _show_ratios(result)
        print(
            f"  {slow} had {result.slow_contributions_merged} contributions merged;"
            f" nobody waited for more than {result.wait_share_max:.2%} of its time"
        )
        if result.synchronous is not None:
            print("the same with synchronous DiLoCo (K = M):")
            _show_ratios(result.synchronous)

    result = measure(settings, bench, show)
    if not result.equal:
        raise DilocoError(
            f"the rates differ by more than {result.bound:.0%}: {result.ratio_median:.4f}"
        )


def _show_ratios(result: PaceResult) -> None:
    print(
        f"  median {result.ratio_median:.4f}, from {result.ratio_min:.4f} to"
        f" {result.ratio_max:.4f}, over {result.pairs} pairs of {result.window_s:g} s"
    )


VERB = Verb(
    name="bench pace",
    summary="measure that a slow learner slows nobody",
    details=(
        "Measure that a slow learner slows nobody: one server and two fast learners run on, while\n"
        "a slow one joins for every second window. Prints the ratio of the fast ones' step rates\n"
        "with and without it; exit code 1 if the median over the pairs is not within 2% of 1.\n"
        "Of synchronous DiLoCo, where all must answer, --synchronous says what is left."
    ),
    examples="examples:\n  diloco bench pace\n  diloco bench pace --pairs 3 --window-s 5 --json\n"
    "  diloco bench pace --slow-learners 2 --slow-factor 2 --pace-s 0.4 --synchronous",
    settings=BenchPaceSettings,
    run=run,
)
