"""What is kept of a run when learners fail more and more often: the same schedule of kills at
several mean times between failures, held to the run without faults.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from fragments.runspec import RunSpec
from harness.chaos.judgement import Judgement
from harness.chaos.outages import OutageKind, Rates, draw_outages
from harness.chaos.plan import ChaosPlan, Places, small_data, small_spec
from harness.chaos.result import ChaosResult, Models
from harness.chaos.run import Chaos
from harness.chaos.schedule import Faults
from harness.plan import names_of

GOODPUT_BOUND = 0.8
"""Least goodput at the rate at which data-parallel training keeps DATA_PARALLEL."""

DATA_PARALLEL = 0.575
"""The middle of 55 to 60%."""

LOSS_BOUND = 0.01


def rates_spec() -> RunSpec:
    """The run of `diloco chaos`, synchronised so seldom that what is on its way costs little."""
    return small_spec().model_copy(
        update={"sync_interval": RunSpec(sync_interval=32).sync_interval}  # type: ignore[arg-type]  # a plain H; the model parses it
    )


class FaultRatesResult(BaseModel):
    """`undisturbed` and `runs`, by falling MTBF; all train the same tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    undisturbed: ChaosResult
    runs: tuple[ChaosResult, ...]
    goodput_bound: float = GOODPUT_BOUND
    loss_bound: float = LOSS_BOUND
    falls_short: tuple[str, ...] = Field(description="a sentence for each figure that is not met")

    @property
    def held_to(self) -> ChaosResult:
        """The run in which data-parallel keeps what is nearest to DATA_PARALLEL."""
        return nearest(self.runs)


def models_of(run: ChaosResult) -> Models:
    """Those of a run in which nothing befell anybody are undisturbed."""
    if run.models is not None:
        return run.models
    return Models(restart_s=0.0, checkpoint_s=0.0, data_parallel=1.0, papers_rule=1.0)


def nearest(runs: Sequence[ChaosResult]) -> ChaosResult:
    """That in which data-parallel keeps what is nearest to DATA_PARALLEL."""
    return min(runs, key=lambda run: abs(models_of(run).data_parallel - DATA_PARALLEL))


@dataclass(frozen=True, slots=True)
class FaultRatesPlan:
    """What to run, `mtbfs_s` one after another. `tokens`: that each run trains."""

    out: Path
    mtbfs_s: tuple[float, ...] = (400.0, 130.0, 60.0)
    repair_s: float = 10.0
    learners: int = 4
    pace_s: float = 0.25
    tokens: int = 1_200_000
    checkpoint_every_s: float = 10.0
    seed: int = 0
    wall_limit_s: float = 3600.0

    def chaos(self, mtbf_s: float | None) -> ChaosPlan:
        """The run at an MTBF; None for that without faults."""
        name = "undisturbed" if mtbf_s is None else f"mtbf-{mtbf_s:g}"
        plan = ChaosPlan(
            out=self.out / name,
            spec=rates_spec(),
            faults=Faults(),
            seed=self.seed,
            learners=self.learners,
            pace_s=self.pace_s,
            data=small_data(),
            wall_limit_s=self.wall_limit_s,
            tokens=self.tokens,
            checkpoint_every_s=self.checkpoint_every_s,
        )
        if mtbf_s is None:
            return plan
        rates = Rates(mtbf_s, self.repair_s, (OutageKind.KILL,))
        outages = draw_outages(rates, names_of(plan.islands), self.wall_limit_s, self.seed)
        return replace(plan, outages=outages, mtbf_s=mtbf_s, repair_s=self.repair_s)


@dataclass(slots=True)
class FaultRatesBench:
    """Does all runs, one after another. Leaves no process behind, however it ends."""

    plan: FaultRatesPlan
    stop: threading.Event
    tell: Callable[[str], None]

    def run(self) -> FaultRatesResult:
        """All of it.

        Raises:
            StoppedError: when `stop` was set.
            DilocoError: as `Chaos.run` does.
        """
        self.tell("the run without faults, to compare with")
        calm = self.plan.chaos(None)
        undisturbed = Chaos(calm, self.stop, self.tell).run()
        self.tell(f"it keeps {undisturbed.goodput:.1%}, its loss is {undisturbed.loss:.4f}")
        judged = Judgement.model_validate_json(Places(calm.out).judgement.read_text("utf-8"))
        runs = []
        for mtbf_s in sorted(self.plan.mtbfs_s, reverse=True):
            self.tell(f"a learner fails every {mtbf_s:g} s")
            run = Chaos(self.plan.chaos(mtbf_s), self.stop, self.tell).run(judged)
            runs.append(run)
            self.tell(
                f"{run.goodput:.1%} kept, where data-parallel would keep"
                f" {models_of(run).data_parallel:.1%}"
            )
        return FaultRatesResult(
            undisturbed=undisturbed, runs=tuple(runs), falls_short=tuple(_short(undisturbed, runs))
        )


def _short(undisturbed: ChaosResult, runs: Sequence[ChaosResult]) -> list[str]:
    found = [finding for run in (undisturbed, *runs) for finding in run.findings]
    held_to = nearest(runs)
    bound = max(GOODPUT_BOUND, models_of(held_to).papers_rule)
    if held_to.goodput < bound:
        found.append(
            f"at an MTBF of {held_to.mtbf_s:g} s {held_to.goodput:.1%} are kept, not {bound:.1%}"
        )
    if held_to.uptime < 1:
        found.append(f"at an MTBF of {held_to.mtbf_s:g} s the uptime is {held_to.uptime:.1%}")
    return found
