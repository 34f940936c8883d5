"""What synchronisation costs a learner: its step time with it and without it, pair by pair.

The learner and a process that steps the same program alone share one core and take turns on it;
the server, its merges and this bench have the others. So the difference is all that synchronising
does to the training thread: reports, answers, pulls, adoptions, and waiting for the interpreter.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fragments.errors import DilocoError, SettingsError
from fragments.runspec import ProgramSettings, RunSpec
from harness import gated
from harness.cluster import START_LIMIT_S, Cluster
from harness.environment import child_environment, module
from harness.gated import Gate
from harness.pace import endless
from harness.plan import Island
from harness.presets import preset
from harness.processes import Command, Supervisor
from harness.warm import request, use_cache
from services.client.status import fetch_status

BOUND = 1.02
"""The claim: the ratio of step times is at most this."""

_CONFIDENCE = 0.95
_SYNCED, _ALONE = "learner", "alone"
_WARM_STEPS = 20
_SETTLE_S = 1.0
"""After a change of turns, before a window: what waited meanwhile is done first."""


class OverheadResult(BaseModel):
    """Mean seconds a step in each window, and their ratios, with synchronisation over without.

    `ratio_upper` is at or above the true median with `confidence`: an order statistic, which
    supposes nothing of how ratios are distributed.
    """

    model_config = ConfigDict(frozen=True)

    pairs: int
    window_s: float
    learner_core: int
    other_cores: tuple[int, ...]
    sync_interval_steps: int
    with_sync_s: tuple[float, ...]
    without_sync_s: tuple[float, ...]
    ratios: tuple[float, ...]
    ratio_median: float
    ratio_upper: float
    confidence: float
    contributions_merged: int
    bound: float = BOUND
    within: bool


def upper_of_median(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """The smallest order statistic at or above the median with that confidence, and its own.

    At or above it, unless all of the first k values of n are below, is the k-th with probability
    P(B < k), B binomial of n and 1/2. Of too few values it is the largest, with what that has.
    """
    ordered, below = sorted(values), 0.0
    for k, value in enumerate(ordered, start=1):
        below += math.comb(len(ordered), k - 1) / 2 ** len(ordered)
        if below >= confidence:
            return value, below
    return ordered[-1], below


def mean_step_s(stamps: Sequence[float], begin_s: float, end_s: float) -> float:
    """Mean seconds from step to step within a window.

    Raises:
        DilocoError: for fewer than three steps in it.
    """
    inside = [at_s for at_s in stamps if begin_s <= at_s <= end_s]
    if len(inside) < 3:
        raise DilocoError("too few steps in a window to tell their time: give a longer --window-s")
    return (inside[-1] - inside[0]) / (len(inside) - 1)


@dataclass(frozen=True, slots=True)
class OverheadPlan:
    """What to measure. `spec` is the run; its budget must outlast the bench, and its program is
    the reference one.
    """

    out: Path
    spec: RunSpec = field(default_factory=lambda: endless(preset("demo").spec))
    pairs: int = 7
    window_s: float = 10.0


@dataclass(slots=True)
class OverheadBench:
    """One bench. `tell` gets a line for each pair. Call `run` once."""

    plan: OverheadPlan
    stop: threading.Event
    tell: Callable[[str], None]

    def run(self) -> OverheadResult:
        """Measures all pairs.

        Raises:
            StoppedError: when `stop` was set.
            SettingsError: where there are not two cores that processes can be pinned to.
            DilocoError: when a process ended that should not, or something took too long.
        """
        core, others = _cores()
        plan = self.plan
        gates = plan.out / "gates"
        gates.mkdir(parents=True, exist_ok=True)
        own = gated.settings(gates, dict(plan.spec.program.settings))
        program = ProgramSettings(factory=gated.FACTORY, settings=own)
        spec = plan.spec.model_copy(update={"program": program})
        with _pinned(others), Supervisor() as processes:
            cluster = Cluster(plan.out, spec, None, self.stop, processes)
            cluster.make_run()
            cluster.start_compiling()
            address = cluster.serve()
            with _pinned({core}):
                cluster.learn(Island(_SYNCED, 0.0))
            synced = Gate(gates, processes.pids()[_SYNCED])
            self._warm(cluster, synced)
            with _pinned({core}):
                self._start_alone(cluster, spec)
            alone = Gate(gates, processes.pids()[_ALONE])
            self._warm(cluster, alone)
            try:
                before = _merged(address)
                times = [self._pair(cluster, pair, synced, alone) for pair in range(plan.pairs)]
                merged = _merged(address) - before
            finally:
                for gate in (synced, alone):
                    gate.open()
        return self._result(times, merged, core, others)

    def _start_alone(self, cluster: Cluster, spec: RunSpec) -> None:
        environ = child_environment()
        use_cache(environ, cluster.out / "cache")
        argv = module("harness.gated", request(spec, None))
        cluster.processes.start(Command(_ALONE, argv, cluster.log(_ALONE), environ))

    def _warm(self, cluster: Cluster, gate: Gate) -> None:
        """Until it steps at its pace; then it waits for its turn."""
        cluster.until(
            lambda: self._lives(cluster) and len(gate.stamps()) >= _WARM_STEPS,
            2 * START_LIMIT_S,
            "the first steps",
        )
        gate.shut()

    def _lives(self, cluster: Cluster) -> bool:
        for name in cluster.processes.pids():
            cluster.processes.require_alive(name)
        cluster.processes.require_alive(_SYNCED)
        return True

    def _pair(self, cluster: Cluster, pair: int, synced: Gate, alone: Gate) -> tuple[float, float]:
        """Seconds a step with and without; who is first alternates, so that drift cancels."""
        if pair % 2:
            without_s = self._window(cluster, alone)
            with_s = self._window(cluster, synced)
        else:
            with_s = self._window(cluster, synced)
            without_s = self._window(cluster, alone)
        self.tell(
            f"pair {pair + 1} of {self.plan.pairs}: {with_s:.4f} s a step with,"
            f" {without_s:.4f} without, ratio {with_s / without_s:.4f}"
        )
        return with_s, without_s

    def _window(self, cluster: Cluster, gate: Gate) -> float:
        """One turn of one process."""
        processes = cluster.processes
        gate.open()
        begin_s = processes.clock() + _SETTLE_S
        end_s = begin_s + self.plan.window_s
        cluster.until(
            lambda: self._lives(cluster) and processes.clock() >= end_s,
            self.plan.window_s + START_LIMIT_S,
            "a window",
        )
        gate.shut()
        return mean_step_s(gate.stamps(), begin_s, end_s)

    def _result(
        self,
        times: Sequence[tuple[float, float]],
        merged: int,
        core: int,
        others: frozenset[int],
    ) -> OverheadResult:
        ratios = [with_s / without_s for with_s, without_s in times]
        upper, confidence = upper_of_median(ratios, _CONFIDENCE)
        return OverheadResult(
            pairs=len(times),
            window_s=self.plan.window_s,
            learner_core=core,
            other_cores=tuple(sorted(others)),
            sync_interval_steps=self.plan.spec.interval_steps(0),
            with_sync_s=tuple(round(with_s, 5) for with_s, _ in times),
            without_sync_s=tuple(round(without_s, 5) for _, without_s in times),
            ratios=tuple(round(ratio, 4) for ratio in ratios),
            ratio_median=round(statistics.median(ratios), 4),
            ratio_upper=round(upper, 4),
            confidence=round(confidence, 4),
            contributions_merged=merged,
            within=upper <= BOUND,
        )


def _merged(address: str) -> int:
    return sum(learner.contributions_merged for learner in fetch_status(address).learners)


def _cores() -> tuple[int, frozenset[int]]:
    """The learner's core, and those of all others."""
    if sys.platform != "linux":
        raise SettingsError("diloco bench overhead pins processes to cores, which needs Linux")
    *others, core = sorted(os.sched_getaffinity(0))
    if not others:
        raise SettingsError("diloco bench overhead needs two cores, and this process may use one")
    return core, frozenset(others)


@contextmanager
def _pinned(cores: set[int] | frozenset[int]) -> Iterator[None]:
    """Inside, this thread and whatever it starts run on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
