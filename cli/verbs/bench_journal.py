"""`diloco bench journal`: what durability costs, and how soon a killed server is back."""

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
    from harness.durable import DurableResult


class BenchJournalSettings(MeasureSettings):
    """How big, and how often."""

    params: str = Field(default="25M", description="parameters of the model: 25M, 1e8, 1000")
    pairs: int = Field(default=7, ge=1, le=50, description="measurements with and without")
    pushers: int = Field(default=4, ge=2, le=16, description="learners that push at once")
    merges: int = Field(
        default=72,
        ge=1,
        le=10_000,
        description="rounds merged, at least, before the server is killed: every fragment is merged"
        " equally often",
    )
    limit_s: float = Field(
        default=300.0, ge=10, description="longest wait for any part of it, seconds"
    )


def run(settings: BenchJournalSettings) -> None:
    """Measures and prints.

    Raises:
        DilocoError: when a bound does not hold, after printing it.
    """
    from harness.wire.plan import parse_params

    params = parse_params(settings.params)

    def bench(out: Path, stop: threading.Event, tell: Callable[[str], None]) -> DurableResult:
        from harness.durable import DurableBench

        return DurableBench(
            out, params, settings.pairs, settings.pushers, settings.merges, settings.limit_s,
            stop, tell,
        ).run()  # fmt: skip

    def show(result: DurableResult) -> None:
        print(
            f"pushes of {result.payload_bytes} bytes by {result.pushers} learners at once, with"
            f" the journal over without:\n  median {result.ratio_median:.3f} of"
            f" {len(result.without_per_s)} pairs (at least {result.bound}); writing and syncing"
            f" as many bytes takes this disk {result.fsync_ms} ms\n"
            f"a server of {result.params:,} parameters that was killed answers again after"
            f" {result.recovery_s} s (at most {result.recovery_bound_s:g}), with"
            f" {result.recovery_merges} merges done anew"
        )

    result = measure(settings, bench, show)
    if not result.holds:
        raise DilocoError("a bound does not hold: see above")


VERB = Verb(
    name="bench journal",
    summary="measure what durability costs, and how soon a killed server is back",
    details=(
        "Measure what it costs that a push is acknowledged only when it is on disk: pushes a\n"
        "second with the journal and without, in turns on the same disk, over real gRPC to a\n"
        "server process; then kill a server with -9 after some rounds and take the time until it\n"
        "answers again, with all of them.\n\n"
        "The bounds are meant for models of 25M to 100M parameters. Of a small one (1M) a push is\n"
        "over before the disk has synced it once, so that its share of pushes says nothing; the\n"
        "15 s are for what 100M parameters have to read and to merge again."
    ),
    examples=(
        "examples:\n  diloco bench journal\n  diloco bench journal --params 100M --json\n\n"
        "exit code 1: fewer than 85% of the pushes, or more than 15 s"
    ),
    settings=BenchJournalSettings,
    run=run,
)
