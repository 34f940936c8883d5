"""Do slow learners slow the fast ones? Their step rate with and without them, pair by pair; and the
same with synchronous DiLoCo, where they must.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fragments.errors import DilocoError
from fragments.overlay import overlay
from fragments.policies import policy_settings
from fragments.records import LearnerState, LearnerStatus, RunStatus
from fragments.runspec import RunSpec
from harness.cluster import START_LIMIT_S, Cluster
from harness.plan import SLOW_NAME, Island, make_islands, names_of
from harness.presets import preset
from harness.processes import Supervisor
from harness.watcher import StatusWatcher

BOUND = 0.02
"""The rates count as equal within this share."""

_LOOK_S = 0.1
_WARM_STEPS = 10
"""Steps of a fast learner before the first window: its first ones include compilation."""

_PRESENT_STEPS = 2
"""Steps of a slow learner after which it counts as taking part: its start takes a core for some
seconds, which is not what is measured."""

_SYNCHRONOUS_WINDOW = 3
"""A window of synchronous DiLoCo is so many times longer: fast learners stand still for seconds."""


class PaceResult(BaseModel):
    """Step rates of the fast learners, mean over them, in steps a second, by pair.

    `ratios` are with / without; the claim is that their median is within BOUND of 1.
    `wait_share_max` is the largest of the fast learners' over the whole bench. `synchronous`: the
    same of synchronous DiLoCo (K = M), where it was measured.
    """

    model_config = ConfigDict(frozen=True)

    pairs: int
    pace_s: float
    fast: int
    slow: int
    slow_factor: float
    window_s: float
    without_slow: tuple[float, ...]
    with_slow: tuple[float, ...]
    ratios: tuple[float, ...]
    ratio_median: float
    ratio_min: float
    ratio_max: float
    wait_share_max: float
    slow_contributions_merged: int
    bound: float = BOUND
    equal: bool
    synchronous: PaceResult | None = None


def endless(spec: RunSpec) -> RunSpec:
    """The same run with a budget that no bench reaches."""
    return spec.model_copy(update={"budget_tokens": 1_000_000_000})


@dataclass(frozen=True, slots=True)
class PacePlan:
    """What to measure: fast learners, and slow ones that come and go.

    `spec` is the run that they train; its budget must outlast the bench.
    """

    out: Path
    spec: RunSpec = field(default_factory=lambda: endless(preset("demo").spec))
    pairs: int = 7
    window_s: float = 10.0
    pace_s: float = 0.22
    slow_factor: float = 3.0
    fast: int = 2
    slow: int = 1

    def synchronous(self) -> PacePlan:
        """The same with synchronous DiLoCo: whoever is there must answer."""
        learners = self.fast + self.slow
        given = self.spec.model_dump(exclude_unset=True) | {"max_learners": learners}
        spec = RunSpec.model_validate(overlay(given, policy_settings("diloco", learners)))
        return replace(
            self,
            out=self.out / "synchronous",
            spec=spec,
            window_s=_SYNCHRONOUS_WINDOW * self.window_s,
        )


@dataclass(slots=True)
class PaceBench:
    """One server and fast learners that stay; the slow ones join and leave for each pair."""

    plan: PacePlan
    stop: threading.Event
    tell: Callable[[str], None]
    _status: RunStatus | None = None
    _samples: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    _wait_shares: dict[str, float] = field(default_factory=dict)
    _slow_merged: dict[str, int] = field(default_factory=dict)

    def run(self) -> PaceResult:
        """Measures all pairs.

        Raises:
            StoppedError: when `stop` was set.
            DilocoError: when a process ended that should not, or something took too long.
        """
        plan = self.plan
        fast = make_islands(plan.fast, plan.pace_s, 1.0)
        slow = _slow_islands(plan)
        names = names_of(fast)
        without: list[float] = []
        beside: list[float] = []
        with Supervisor() as processes:
            cluster = Cluster(plan.out, plan.spec, None, self.stop, processes)
            cluster.make_run()
            cluster.start_compiling()
            address = cluster.serve()
            for island in fast:
                cluster.learn(island)
            with StatusWatcher(address, _LOOK_S) as watcher:
                self._await_steps(cluster, watcher, dict.fromkeys(names, _WARM_STEPS))
                for pair in range(plan.pairs):
                    without.append(self._window(cluster, watcher, names))
                    self._bring(cluster, watcher, slow)
                    beside.append(self._window(cluster, watcher, names))
                    processes.stop(names_of(slow))
                    self.tell(
                        f"pair {pair + 1} of {plan.pairs}: {without[-1]:.3f} steps/s without,"
                        f" {beside[-1]:.3f} with, ratio {beside[-1] / without[-1]:.4f}"
                    )
        return self._result(without, beside)

    def _bring(self, cluster: Cluster, watcher: StatusWatcher, slow: Sequence[Island]) -> None:
        """Starts the slow learners and waits until they take part."""
        before = self._steps()
        for island in slow:
            cluster.learn(island)
        wanted = {each.name: before.get(each.name, 0) + _PRESENT_STEPS for each in slow}
        self._await_steps(cluster, watcher, wanted)

    def _await_steps(
        self, cluster: Cluster, watcher: StatusWatcher, wanted: dict[str, int]
    ) -> None:
        def is_over() -> bool:
            self._look(watcher)
            for name in wanted:
                cluster.processes.require_alive(name)
            steps = self._steps()
            return all(steps.get(name, 0) >= count for name, count in wanted.items())

        cluster.until(is_over, START_LIMIT_S, f"the start of {', '.join(wanted)}")

    def _window(self, cluster: Cluster, watcher: StatusWatcher, names: Sequence[str]) -> float:
        """Mean step rate of the named learners over one window, in steps a second."""
        self._samples = []
        end_s = cluster.processes.now_s + self.plan.window_s

        def is_over() -> bool:
            self._look(watcher)
            return cluster.processes.now_s >= end_s

        cluster.until(is_over, 2 * self.plan.window_s + 5, "a window")
        return statistics.fmean(
            slope([(at_s, steps[name]) for at_s, steps in self._samples]) for name in names
        )

    def _look(self, watcher: StatusWatcher) -> None:
        fresh = watcher.take()
        if fresh is None:
            return
        self._status = fresh
        self._samples.append((fresh.uptime_s, self._steps()))
        for learner in fresh.learners:
            if learner.name.startswith(SLOW_NAME):
                self._slow_merged[learner.name] = learner.contributions_merged
            elif _is_training(learner):
                self._wait_shares[learner.name] = learner.wait_share

    def _steps(self) -> dict[str, int]:
        learners = self._status.learners if self._status is not None else ()
        return {learner.name: learner.steps for learner in learners}

    def _result(self, without: list[float], beside: list[float]) -> PaceResult:
        ratios = [b / w for b, w in zip(beside, without, strict=True)]
        median = statistics.median(ratios)
        return PaceResult(
            pairs=self.plan.pairs,
            pace_s=self.plan.pace_s,
            fast=self.plan.fast,
            slow=self.plan.slow,
            slow_factor=self.plan.slow_factor,
            window_s=self.plan.window_s,
            without_slow=tuple(round(rate, 4) for rate in without),
            with_slow=tuple(round(rate, 4) for rate in beside),
            ratios=tuple(round(ratio, 4) for ratio in ratios),
            ratio_median=round(median, 4),
            ratio_min=round(min(ratios), 4),
            ratio_max=round(max(ratios), 4),
            wait_share_max=round(max(self._wait_shares.values(), default=0.0), 5),
            slow_contributions_merged=sum(self._slow_merged.values()),
            equal=abs(median - 1) <= BOUND,
        )


def measure_both(plan: PacePlan, stop: threading.Event, tell: Callable[[str], None]) -> PaceResult:
    """Ours, and then the same with synchronous DiLoCo. Raises as `PaceBench.run` does."""
    ours = PaceBench(plan, stop, tell).run()
    tell("the same with synchronous DiLoCo: all must answer")
    beside = plan.synchronous()
    beside.out.mkdir(parents=True)
    return ours.model_copy(update={"synchronous": PaceBench(beside, stop, tell).run()})


def _slow_islands(plan: PacePlan) -> list[Island]:
    names = [SLOW_NAME, *(f"{SLOW_NAME}-{number}" for number in range(2, plan.slow + 1))]
    return [Island(name, plan.pace_s * plan.slow_factor) for name in names]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Slope of the least-squares line through (x, y) points.

    Of a step counter over time it is the step rate; counted from end to end it would be off by one
    step in the few dozen of a window, which is more than what is to be seen.

    Raises:
        DilocoError: for fewer than two points in time.
    """
    if len({x for x, _ in points}) < 2:
        raise DilocoError("too few looks at the run to tell a rate: give a longer --window-s")
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


def _is_training(learner: LearnerStatus) -> bool:
    return learner.state is LearnerState.TRAINING
