"""`diloco bench overhead`: what does synchronisation cost a learner's steps?"""

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
    from harness.overhead import OverheadResult


class BenchOverheadSettings(MeasureSettings):
    """How often and how long."""

    pairs: int = Field(default=7, ge=1, le=50, description="windows with and without")
    window_s: float = Field(default=10.0, ge=2, le=120, description="seconds of each window")


def run(settings: BenchOverheadSettings) -> None:
    """Measures and prints the step times' ratio.

    Raises:
        SettingsError: where there are not two cores that processes can be pinned to.
        DilocoError: when its upper bound is above 1.02, after printing it.
    """

    def bench(out: Path, stop: threading.Event, tell: Callable[[str], None]) -> OverheadResult:
        from harness.overhead import OverheadBench, OverheadPlan

        plan = OverheadPlan(out=out, pairs=settings.pairs, window_s=settings.window_s)
        return OverheadBench(plan, stop, tell).run()

    def show(result: OverheadResult) -> None:
        print(
            f"step time with synchronisation over that without, on core {result.learner_core}:\n"
            f"  median {result.ratio_median:.4f}, at most {result.ratio_upper:.4f} with"
            f" {result.confidence:.1%} confidence, over {result.pairs} pairs of"
            f" {result.window_s:g} s;\n"
            f"  {result.contributions_merged} contributions were merged,"
            f" H = {result.sync_interval_steps}"
        )

    result = measure(settings, bench, show)
    if not result.within:
        raise DilocoError(
            f"steps may take more than {result.bound - 1:.0%} longer: {result.ratio_upper:.4f}"
        )


VERB = Verb(
    name="bench overhead",
    summary="measure what synchronisation costs a learner's steps",
    details=(
        "Measure what synchronisation costs a learner's steps: a learner of the demo's model, and\n"
        "a process that steps the same program and does nothing else, take turns on one core,\n"
        "while the server has the others. Prints the ratio of their step times; exit code 1 if\n"
        "the upper bound of its median over the pairs is above 1.02. Leave the machine alone\n"
        "meanwhile. Linux only."
    ),
    examples=(
        "examples:\n  diloco bench overhead\n"
        "  diloco bench overhead --pairs 11 --window-s 20 --json"
    ),
    settings=BenchOverheadSettings,
    run=run,
)
