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
from harness.chaos.result import ChaosResult
from harness.chaos.run import Chaos
from harness.dataparallel.job import DataParallelJob, Here, Places
from harness.dataparallel.killed import KilledJob
from harness.dataparallel.lives import JobResult
from harness.fault_rates.plan import WAYS, FaultRatesPlan, schedule_words
from harness.fault_rates.result import FaultRatesResult, RateRun, falls_short
from harness.sites import DELAYED_BY, Sites, why_no_sites


@dataclass(slots=True)
class FaultRatesBench:
    """Does all runs, one after another. Leaves no process behind, however it ends."""

    plan: FaultRatesPlan
    stop: threading.Event
    tell: Callable[[str], None]
    keep: Callable[[FaultRatesResult], None] = lambda _result: None
    """Gets what there is whenever a run has finished, so that a stop loses the one under way."""
    _begun: int = field(default=0, init=False)
    _undisturbed: ChaosResult | None = field(default=None, init=False)
    _runs: list[RateRun] = field(default_factory=list, init=False)

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
        self.tell(
            "seconds at the head of a line count from the run's first step, for which all wait"
        )
        self._announce("Decoupled DiLoCo without faults, to compare with")
        calm = plan.undisturbed()
        self._undisturbed = Chaos(calm, self.stop, self.tell).run()
        self._finished(self._undisturbed)
        self.tell(f"its loss is {self._undisturbed.loss:.4f}")
        judged = Judgement.model_validate_json(chaos.Places(calm.out).judgement.read_text("utf-8"))
        for mtbf_s, seed in plan.schedules:
            self._at(mtbf_s, seed, judged)
        return self._result()

    def _at(self, mtbf_s: float, seed: int, undisturbed: Judgement) -> None:
        """The three of one schedule."""
        plan = self.plan
        ways = [f"{schedule_words(mtbf_s, seed)}: {way}" for way, _place in WAYS]
        self._announce(ways[0])
        ours = Chaos(plan.decoupled(mtbf_s, seed), self.stop, self.tell).run(undisturbed)
        self._finished(ours)
        self._announce(ways[1])
        job, downtimes = plan.data_parallel(mtbf_s, seed)
        with self._places(job) as places:
            killed = KilledJob(
                job, downtimes, ours.wall_s, plan.restart_s, self.stop, self.tell, places=places
            )
            parallel = killed.run()
        (job.out / "job.json").write_text(parallel.model_dump_json(indent=2) + "\n", "utf-8")
        self._finished(parallel)
        self._announce(ways[2])
        synchronous = Chaos(plan.synchronous(mtbf_s, seed), self.stop, self.tell).run()
        run = RateRun(
            mtbf_s=mtbf_s, seed=seed, data_parallel=parallel, synchronous=synchronous,
            decoupled=ours,
        )  # fmt: skip
        self._runs.append(run)
        self._finished(synchronous)

    def _finished(self, one: ChaosResult | JobResult) -> None:
        self.tell(f"it keeps {one.goodput:.1%}")
        self.keep(self._result())

    def _result(self) -> FaultRatesResult:
        """Of the schedules all of whose runs have finished."""
        assert self._undisturbed is not None
        plan, runs = self.plan, tuple(self._runs)
        finished = self._begun - 1
        missing = tuple(
            f"{what} (finished: {place})" if number < finished else what
            for number, (what, place) in enumerate(plan.runs_of_schedules)
            if number >= len(WAYS) * len(runs)
        )
        return FaultRatesResult(
            undisturbed=self._undisturbed,
            runs=runs,
            missing=missing,
            repair_s=plan.repair_s,
            restart_s=plan.restart_s,
            checkpoint_s=plan.checkpoint_every_s,
            rate_mbit=plan.rate_mbit,
            delay_ms=plan.delay_ms,
            delayed_by=DELAYED_BY if plan.delay_ms else "",
            falls_short=tuple(
                falls_short(self._undisturbed, runs, missing, is_thin=bool(plan.rate_mbit))
            ),
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
