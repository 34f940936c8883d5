"""`diloco bench faults`: what three ways to train keep when learners are killed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from cli.measure import MeasureSettings, measure
from cli.verb import Verb
from fragments.errors import DilocoError, SettingsError

if TYPE_CHECKING:
    from harness.fault_rates.plan import FaultRatesPlan
    from harness.fault_rates.result import FaultRatesResult


class BenchFaultsSettings(MeasureSettings):
    """How often learners fail, and in what run."""

    mtbf_s: str = Field(
        default="400,180,80",
        description="mean seconds that a learner works between two kills: three runs for each",
    )
    repair_s: float = Field(
        default=10.0, gt=0, le=3600, description="seconds until a killed learner is repaired"
    )
    restart_s: float = Field(
        default=12.0,
        ge=0,
        le=3600,
        description="seconds from a repair to the next step, the same for all",
    )
    learners: int = Field(default=4, ge=1, le=16, description="number of learners")
    pace_s: float = Field(default=0.25, gt=0, description="least seconds a step of a learner takes")
    tokens: int = Field(
        default=500_000, gt=0, description="trained in a run, by all learners; 256 a step"
    )
    checkpoint_every_s: float = Field(
        default=10.0, gt=0, description="between two checkpoints, of a learner and of the job"
    )
    seed: int = Field(default=1, ge=0, description="of the schedule; the same for the same seed")
    seeds: int = Field(
        default=1, ge=1, le=20, description="schedules for each MTBF, from that seed on"
    )
    rate_mbit: float | None = Field(
        default=None,
        ge=0.1,
        le=100_000,
        description="Mbit/s of each learner's link, each way, for all three ways to train; takes"
        " root (default: loopback)",
    )
    delay_ms: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="of that link, one way; with --rate-mbit",
    )


def plan_of(settings: BenchFaultsSettings, out: Path) -> FaultRatesPlan:
    """What these settings ask for. SettingsError for what says nothing, or is none."""
    from harness.fault_rates.plan import FaultRatesPlan

    try:
        mtbfs_s = tuple(float(word) for word in settings.mtbf_s.split(",") if word.strip())
    except ValueError:
        mtbfs_s = ()
    if not mtbfs_s or not all(0 < each < 1e9 for each in mtbfs_s):
        raise SettingsError(f"--mtbf-s {settings.mtbf_s}: give seconds, such as 400,180,80")
    if settings.delay_ms and settings.rate_mbit is None:
        raise SettingsError("--delay-ms: give --rate-mbit too, such as 1000")
    return FaultRatesPlan(
        out=out,
        mtbfs_s=mtbfs_s,
        repair_s=settings.repair_s,
        restart_s=settings.restart_s,
        learners=settings.learners,
        pace_s=settings.pace_s,
        tokens=settings.tokens,
        checkpoint_every_s=settings.checkpoint_every_s,
        seed=settings.seed,
        seeds=settings.seeds,
        rate_mbit=settings.rate_mbit,
        delay_ms=settings.delay_ms,
    )


def run(settings: BenchFaultsSettings) -> None:
    """Does all runs and prints what was kept.

    Raises:
        SettingsError: see `plan_of`.
        DilocoError: when a figure is not met, after printing the result.
    """
    # Before an earlier run in --out is put aside for this one.
    plan = plan_of(settings, Path())

    def bench(out: Path, stop: threading.Event, tell: Callable[[str], None]) -> FaultRatesResult:
        from harness.fault_rates.plot import draw
        from harness.fault_rates.report import report
        from harness.fault_rates.run import FaultRatesBench

        def keep(result: FaultRatesResult) -> None:
            _write(out / "faults.json", result.model_dump_json(indent=2))
            _write(out / "faults.md", report(result))

        result = FaultRatesBench(replace(plan, out=out), stop, tell, keep).run()
        draw(result, out / "faults.png")
        return result

    def show(result: FaultRatesResult) -> None:
        from harness.fault_rates.report import report

        print(report(result))

    result = measure(settings, bench, show)
    if result.falls_short:
        raise DilocoError("; ".join(result.falls_short))


def _write(path: Path, text: str) -> None:
    """In one move: a stop may come at any time."""
    part = path.with_suffix(".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


VERB = Verb(
    name="bench faults",
    summary="measure what is kept of a run in which learners are killed",
    details=(
        "Measure what is kept of a run in which learners are killed: Decoupled DiLoCo without\n"
        "faults, then, for each mean time between failures, under one schedule of kills:\n"
        "Decoupled DiLoCo, data-parallel training, synchronous DiLoCo. All are real processes\n"
        "whose steps are paced; from a repair to the next step the same time passes for all.\n"
        "Prints goodput beside what the paper's rule gives, uptime and loss, and where the time\n"
        "went. Exit code 1 if a promise is broken, or if less is kept than by the rule, or less\n"
        "than 80%, at the rate at which data-parallel training keeps 55 to 60%; or if it keeps\n"
        "that at none. --out keeps faults.json, faults.md, faults.png and all runs;\n"
        "json and md are written whenever a run finishes, and list what is still missing.\n\n"
        "Says first how long it takes, 40 minutes by the defaults. Processes need seconds of a\n"
        "processor to start, so leave the machine alone meanwhile; the report says how many were\n"
        "late. With --seeds 5 it prints means and standard deviations over five schedules.\n\n"
        "With --rate-mbit each learner is behind a link of that rate: a relay for learners of the\n"
        "outer server, a network namespace for each worker of the data-parallel job, which needs\n"
        "root. What the link costs data-parallel training is then part of what it does not keep,\n"
        "so that 55 to 60% are not asked for."
    ),
    examples=(
        "examples:\n  diloco bench faults --out runs/faults\n"
        "  diloco bench faults --mtbf-s 30 --tokens 300000 --json\n"
        "  sudo diloco bench faults --mtbf-s 180 --rate-mbit 1"
    ),
    settings=BenchFaultsSettings,
    run=run,
)
