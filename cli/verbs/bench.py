"""`diloco bench`: what a synchronisation costs on this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from cli.measure import MeasureSettings, measure
from cli.verb import Verb

if TYPE_CHECKING:
    from harness.wire.result import WireResult


class BenchSettings(MeasureSettings):
    """How big, how many, and for how long."""

    params: str = Field(default="25M", description="parameters of the model: 25M, 1e8, 1000")
    learners: int = Field(default=2, ge=1, le=16, description="learners, each a process")
    fragments: int = Field(default=24, ge=2, le=256, description="P: number of fragments")
    laps: int = Field(
        default=10, ge=1, le=1000, description="times that every fragment is synchronised"
    )
    slow_readers: int = Field(
        default=0, ge=0, le=64, description="clients that pull weights at 0.5 Mbit/s meanwhile"
    )
    limit_s: float = Field(
        default=900.0, ge=10, description="longest wait for any part of it, seconds"
    )


def run(settings: BenchSettings) -> None:
    """Measures and prints.

    Raises:
        SettingsError: for no number of parameters, or a machine without room for it.
    """
    from harness.wire.plan import parse_params

    params = parse_params(settings.params)

    def bench(out: Path, stop: threading.Event, tell: Callable[[str], None]) -> WireResult:
        from harness.wire.plan import WirePlan
        from harness.wire.run import WireBench

        plan = WirePlan(
            out=out,
            params=params,
            learners=settings.learners,
            fragments=settings.fragments,
            laps=settings.laps,
            limit_s=settings.limit_s,
            slow_readers=settings.slow_readers,
        )
        return WireBench(plan, stop, tell).run()

    def show(result: WireResult) -> None:
        from harness.terminal import console
        from harness.wire.report import report_view

        console().print(report_view(result))

    measure(settings, bench, show)


VERB = Verb(
    name="bench",
    summary="measure what a synchronisation costs, stage by stage and as a whole",
    details=(
        "Measure what a synchronisation costs on this machine. First each stage alone: memory,\n"
        "TCP, gRPC, quantizing, packing, merging, the outer step. Then the whole path between\n"
        "real processes, push to adopted, with learners that do nothing else: parameters a\n"
        "second, bits a parameter as counted at the sockets, processor seconds, peak memory, and\n"
        "where the server and a learner spend their time. GB are 10^9 bytes of fp32 parameters.\n\n"
        "It takes some minutes; in memory about 4 times the model's size for the server and twice\n"
        "that size for each learner, and on disk up to 12 times, all of it checked before. Linux\n"
        "only."
    ),
    examples=(
        "examples:\n  diloco bench\n  diloco bench --params 100M --learners 4 --json\n"
        "  diloco bench --params 100M --learners 16 --slow-readers 4 --laps 2\n\n"
        "other benches:\n"
        "  bench pace      measure that a slow learner slows nobody\n"
        "  bench links     compare with data-parallel training over thin links\n"
        "  bench overhead  measure what synchronisation costs a learner's steps\n"
        "  bench journal   measure what durability costs, and how soon a killed server is back\n"
        "  bench faults    measure what is kept of a run in which learners are killed"
    ),
    settings=BenchSettings,
    run=run,
)
