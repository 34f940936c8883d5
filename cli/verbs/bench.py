"""`diloco bench`: what a synchronisation costs on this machine."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pydantic import Field

from cli.keys import VerbSettings
from cli.stop import stop_on_signal
from cli.verb import Verb


class BenchSettings(VerbSettings):
    """How big, how many, and for how long."""

    params: str = Field(default="25M", description="parameters of the model: 25M, 1e8, 1000")
    learners: int = Field(default=2, ge=1, le=16, description="learners, each a process")
    fragments: int = Field(default=24, ge=2, le=256, description="P: number of fragments")
    laps: int = Field(
        default=10, ge=1, le=1000, description="times that every fragment is synchronised"
    )
    limit_s: float = Field(
        default=900.0, ge=10, description="longest wait for any part of it, seconds"
    )
    json_: bool = Field(default=False, alias="json", description="print the result as JSON")
    out: Path | None = Field(
        default=None, description="keep run directories and logs there (default: nothing is kept)"
    )


def run(settings: BenchSettings) -> None:
    """Measures and prints.

    Raises:
        SettingsError: for no number of parameters, or a machine without room for it.
    """
    from harness.outdir import prepare
    from harness.wire.plan import WirePlan, parse_params

    params = parse_params(settings.params)
    with stop_on_signal() as stop, tempfile.TemporaryDirectory(prefix="diloco-bench-") as scratch:
        from harness.cluster import StoppedError
        from harness.terminal import console
        from harness.wire.report import report_view
        from harness.wire.run import WireBench

        if settings.out is not None:
            prepare(settings.out)
        plan = WirePlan(
            out=settings.out or Path(scratch),
            params=params,
            learners=settings.learners,
            fragments=settings.fragments,
            laps=settings.laps,
            limit_s=settings.limit_s,
        )
        try:
            result = WireBench(plan, stop, lambda line: print(line, file=sys.stderr)).run()
        except StoppedError:
            print("stopped before the end", file=sys.stderr)
            return
    if settings.json_:
        print(result.model_dump_json(indent=2))
    else:
        console().print(report_view(result))


VERB = Verb(
    name="bench",
    summary="measure what a synchronisation costs, stage by stage and as a whole",
    details=(
        "Measure what a synchronisation costs on this machine. First each stage alone: memory,\n"
        "TCP, gRPC, quantizing, packing, merging, the outer step. Then the whole path between\n"
        "real processes, push to adopted, with learners that do nothing else: parameters a\n"
        "second, bits a parameter as counted at the sockets, processor seconds, peak memory, and\n"
        "where the server and a learner spend their time. GB are 10^9 bytes of fp32 parameters.\n\n"
        "It takes some minutes; in memory about 16 times the model's size for the server and 6\n"
        "times for each learner, and on disk up to 12 times, all of it checked before. Linux only."
    ),
    examples=(
        "examples:\n  diloco bench\n  diloco bench --params 100M --learners 4 --json\n\n"
        "another bench:\n  bench pace  measure that a slow learner slows nobody"
    ),
    settings=BenchSettings,
    run=run,
)
