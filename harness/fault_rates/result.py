"""What was kept at several rates of kills, and whether that is enough."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from harness.chaos.result import ChaosResult
from harness.dataparallel.lives import JobResult

GOODPUT_BOUND = 0.8
"""Least goodput at the rate at which data-parallel training keeps a share within BAND."""

BAND = (0.55, 0.6)

LOSS_BOUND = 0.01


class RateRun(BaseModel):
    """Three ways to train, under one schedule of kills."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mtbf_s: float
    seed: int
    data_parallel: JobResult
    synchronous: ChaosResult
    decoupled: ChaosResult

    @property
    def papers_rule(self) -> float:
        """What each learner would keep on its own; all of it where nothing befell anybody."""
        models = self.decoupled.models
        return models.papers_rule if models is not None else 1.0


@dataclass(frozen=True, slots=True)
class Mean:
    """Of a figure over the schedules of one rate; `deviation` is None for one schedule."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {100 * self.deviation:.1f}"
        return f"{100 * self.mean:.1f}{spread}%"


@dataclass(frozen=True, slots=True)
class Rate:
    """All schedules with one mean time between failures."""

    mtbf_s: float
    runs: tuple[RateRun, ...]

    def mean(self, figure: Callable[[RateRun], float]) -> Mean:
        """Of that figure of each run."""
        values = [figure(run) for run in self.runs]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return Mean(statistics.fmean(values), deviation)

    @property
    def data_parallel(self) -> Mean:
        """Goodput, measured."""
        return self.mean(lambda run: run.data_parallel.goodput)

    @property
    def synchronous(self) -> Mean:
        """Goodput, measured."""
        return self.mean(lambda run: run.synchronous.goodput)

    @property
    def decoupled(self) -> Mean:
        """Goodput, measured."""
        return self.mean(lambda run: run.decoupled.goodput)

    @property
    def papers_rule(self) -> Mean:
        """Goodput, computed."""
        return self.mean(lambda run: run.papers_rule)

    @property
    def is_in_band(self) -> bool:
        """Whether data-parallel training keeps 55 to 60%."""
        return BAND[0] <= self.data_parallel.mean <= BAND[1]


class FaultRatesResult(BaseModel):
    """`undisturbed` and `runs`, by falling MTBF. Decoupled and synchronous DiLoCo train the same
    tokens in all of them; data-parallel training takes as long as Decoupled DiLoCo beside it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    undisturbed: ChaosResult
    runs: tuple[RateRun, ...]
    missing: tuple[str, ...] = Field(
        default=(), description="runs that this leaves out: not all of their schedule have finished"
    )
    repair_s: float
    restart_s: float = Field(description="from a repair to the next step, set for all")
    checkpoint_s: float = Field(description="from one checkpoint to the next")
    rate_mbit: float | None = Field(
        default=None, description="Mbit/s of each learner's link, each way; null: not bounded"
    )
    delay_ms: float = Field(default=0.0, description="of that link, one way")
    delayed_by: str = Field(
        default="",
        description="how the delay between data-parallel workers is made; empty without one",
    )
    goodput_bound: float = GOODPUT_BOUND
    loss_bound: float = LOSS_BOUND
    falls_short: tuple[str, ...] = Field(description="a sentence for each figure that is not met")

    @property
    def rates(self) -> tuple[Rate, ...]:
        """The runs by their MTBF."""
        return rates_of(self.runs)

    @property
    def judged(self) -> Rate:
        """The rate that Decoupled DiLoCo is judged by."""
        return nearest(self.rates)


def rates_of(runs: Sequence[RateRun]) -> tuple[Rate, ...]:
    """The runs by their MTBF, in their order."""
    mtbfs_s = dict.fromkeys(run.mtbf_s for run in runs)
    return tuple(Rate(m, tuple(run for run in runs if run.mtbf_s == m)) for m in mtbfs_s)


def nearest(rates: Sequence[Rate]) -> Rate:
    """That at which data-parallel training keeps what is nearest to the middle of BAND."""
    return min(rates, key=lambda rate: abs(rate.data_parallel.mean - sum(BAND) / 2))


def bound_of(rate: Rate) -> float:
    """What Decoupled DiLoCo is to keep there: what the paper's rule gives, and where data-parallel
    training keeps 55 to 60% no less than GOODPUT_BOUND.
    """
    rule = rate.papers_rule.mean
    return max(GOODPUT_BOUND, rule) if rate.is_in_band else rule


def falls_short(
    undisturbed: ChaosResult,
    runs: Sequence[RateRun],
    missing: Sequence[str] = (),
    *,
    is_thin: bool = False,
) -> Iterator[str]:
    """A sentence for each figure that is not met. `is_thin`: the links slow data-parallel training
    down, so that what it keeps does not say how hard the faults are.
    """
    if missing:
        yield f"{len(missing)} runs are missing, so this is no judgement of all"
    yield from undisturbed.findings
    for run in runs:
        at = f"at an MTBF of {run.mtbf_s:g} s"
        yield from (f"{at}: {finding}" for finding in run.decoupled.findings)
        yield from (f"{at}, synchronous DiLoCo: {each}" for each in run.synchronous.findings)
    if not runs:
        return
    rate = nearest(rates_of(runs))
    at, kept = f"at an MTBF of {rate.mtbf_s:g} s", rate.data_parallel
    if not rate.is_in_band and not is_thin:
        yield (
            f"data-parallel training keeps {kept} {at}, and 55 to 60% at none: give --mtbf-s"
            f" {'longer' if kept.mean < BAND[0] else 'shorter'} ones to judge by"
        )
    if not any(run.decoupled.learner_kills for run in rate.runs):
        yield f"{at} nobody was killed before the runs were over, so nothing is judged"
    if rate.decoupled.mean < bound_of(rate):
        yield f"{at} {rate.decoupled} are kept, not {bound_of(rate):.1%}"
    uptime = rate.mean(lambda run: run.decoupled.uptime)
    if uptime.mean < 1:
        yield f"{at} the uptime is {uptime}"
