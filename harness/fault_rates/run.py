"""What is kept when learners fail more and more often: Decoupled DiLoCo, synchronous DiLoCo
and data-parallel training under the same kills, at several mean times between failures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fragments.errors import SettingsError
from harness.chaos import plan as chaos
from harness.chaos.judgement import Judgement
from harness.chaos.run import Chaos
from harness.dataparallel.job import DataParallelJob, Here, Places
from harness.dataparallel.killed import KilledJob
from harness.fault_rates.plan import FaultRatesPlan
from harness.fault_rates.result import FaultRatesResult, RateRun, falls_short
from harness.sites import DELAYED_BY, Sites, why_no_sites


@dataclass(slots=True)
class FaultRatesBench:
    """Does all runs, one after another. Leaves no process behind, however it ends."""

    plan: FaultRatesPlan
    stop: threading.Event
    tell: Callable[[str], None]
    _begun: int = field(default=0, init=False)

    def run(self) -> FaultRatesResult:
        """All of it.

        Raises:
            StoppedError: when `stop` was set.
            SettingsError: for links where none can be made; nothing has begun then.
            DilocoError: as `Chaos.run` and `KilledJob.run` do.
        """
        plan = self.plan
        if plan.rate_mbit and (reason := why_no_sites()):
            raise SettingsError(reason)
        self.tell(f"{plan.num_runs} runs, about {plan.expected_s / 60:.0f} minutes in all")
        self._announce("Decoupled DiLoCo without faults, to compare with")
        calm = plan.undisturbed()
        undisturbed = Chaos(calm, self.stop, self.tell).run()
        self.tell(f"it keeps {undisturbed.goodput:.1%}, its loss is {undisturbed.loss:.4f}")
        judged = Judgement.model_validate_json(chaos.Places(calm.out).judgement.read_text("utf-8"))
        runs = tuple(self._at(mtbf_s, seed, judged) for mtbf_s, seed in plan.schedules)
        return FaultRatesResult(
            undisturbed=undisturbed,
            runs=runs,
            repair_s=plan.repair_s,
            restart_s=plan.restart_s,
            checkpoint_s=plan.checkpoint_every_s,
            rate_mbit=plan.rate_mbit,
            delay_ms=plan.delay_ms,
            delayed_by=DELAYED_BY if plan.delay_ms else "",
            falls_short=tuple(falls_short(undisturbed, runs, is_thin=bool(plan.rate_mbit))),
        )

    def _at(self, mtbf_s: float, seed: int, undisturbed: Judgement) -> RateRun:
        """The three of one schedule."""
        plan, schedule = self.plan, f"a kill every {mtbf_s:g} s of a learner, seed {seed}"
        self._announce(f"{schedule}: Decoupled DiLoCo")
        ours = Chaos(plan.decoupled(mtbf_s, seed), self.stop, self.tell).run(undisturbed)
        self.tell(f"it keeps {ours.goodput:.1%}")
        self._announce(f"{schedule}: data-parallel training")
        job, downtimes = plan.data_parallel(mtbf_s, seed)
        with self._places(job) as places:
            killed = KilledJob(
                job, downtimes, ours.wall_s, plan.restart_s, self.stop, self.tell, places=places
            )
            parallel = killed.run()
        self.tell(f"it keeps {parallel.goodput:.1%}")
        self._announce(f"{schedule}: synchronous DiLoCo")
        synchronous = Chaos(plan.synchronous(mtbf_s, seed), self.stop, self.tell).run()
        self.tell(f"it keeps {synchronous.goodput:.1%}")
        return RateRun(
            mtbf_s=mtbf_s,
            seed=seed,
            data_parallel=parallel,
            synchronous=synchronous,
            decoupled=ours,
        )

    @contextmanager
    def _places(self, job: DataParallelJob) -> Iterator[Places]:
        """Where the job's processes are: behind links like those of the learners."""
        if not self.plan.rate_mbit:
            yield Here()
            return
        with Sites(job.sites, self.plan.delay_ms) as sites:
            for name in job.sites:
                sites.shape(name, self.plan.rate_mbit)
            yield sites

    def _announce(self, what: str) -> None:
        self._begun += 1
        self.tell(f"run {self._begun} of {self.plan.num_runs}: {what}")
