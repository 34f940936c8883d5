"""The bench: one network, one model; first data-parallel training, then Decoupled DiLoCo.

Both keep their processes from the first rate to the last; the links are reshaped under them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fragments.runspec import ProgramSettings
from harness import gated
from harness.cluster import INIT, Cluster, Look
from harness.dataparallel.job import DataParallelJob
from harness.environment import child_environment, command, module
from harness.gated import Gate
from harness.ground import Terms
from harness.plan import SERVER, Island
from harness.processes import Command, Supervisor
from harness.sites import DELAYED_BY, Sites
from harness.thin.plan import SETTLE_S, START_LIMIT_S, WARM_STEPS, ThinPlan
from harness.thin.result import (
    DataParallelPoint,
    DecoupledPoint,
    ThinResult,
    claimed,
    holds,
    mean_rate,
)

_STATUS = "status"
_LOOK_S = 0.5
_STEP_LIMIT_S = 120.0
"""A step that takes longer is none."""


@dataclass(slots=True)
class ThinBench:
    """One bench. `tell` gets a line for each rate. Call `run` once."""

    plan: ThinPlan
    stop: threading.Event
    tell: Callable[[str], None]

    def run(self) -> ThinResult:
        """Measures all of it.

        Raises:
            StoppedError: when `stop` was set.
            SettingsError: where no sites can be made.
            DilocoError: when a process ended that should not, or something took too long.
        """
        plan = self.plan
        with Sites((SERVER, *plan.names), plan.delay_ms) as sites:
            round_trip_s = sites.round_trip_s(*plan.names[:2])
            self.tell(f"a round trip between two sites takes {1000 * round_trip_s:.1f} ms")
            self.tell(f"data-parallel training begins at {plan.learners} sites")
            parallel = _DataParallel(plan, sites, self.stop, self.tell).run()
            self.tell("Decoupled DiLoCo begins at the same sites, the server at one of its own")
            decoupled, parameters = _Decoupled(plan, sites, self.stop, self.tell).run()
        spec = plan.spec
        return ThinResult(
            learners=plan.learners,
            parameters=parameters,
            tokens_per_step=plan.tokens_per_step,
            pace_s=plan.pace_s,
            sync_interval_steps=plan.sync_interval,
            fragments=spec.fragments,
            delay_ms=plan.delay_ms,
            delayed_by=DELAYED_BY if plan.delay_ms else "",
            round_trip_ms=round(1000 * round_trip_s, 2),
            codec=f"{spec.codec.kind}, c = {spec.codec.step_fraction_up:g}",
            window_s=plan.window_s,
            data_parallel=parallel,
            decoupled=decoupled,
            claim=(claim := claimed(parallel, decoupled, plan.pace_s)),
            holds=holds(claim),
        )


@dataclass(slots=True)
class _DataParallel:
    plan: ThinPlan
    sites: Sites
    stop: threading.Event
    tell: Callable[[str], None]

    def run(self) -> tuple[DataParallelPoint, ...]:
        plan = self.plan
        job = DataParallelJob(plan.out / "data-parallel", plan.spec, plan.names, plan.pace_s)
        with Supervisor() as processes:
            look = Look(processes, self.stop, job.out / "logs", self.sites.require_alive)
            job.start(processes, self.sites)
            gates = job.gates(processes)
            self._until(look, gates, WARM_STEPS, START_LIMIT_S, "the start of the job")
            return tuple(self._point(look, gates, rate) for rate in plan.rates_mbit)

    def _point(self, look: Look, gates: Sequence[Gate], rate_mbit: float) -> DataParallelPoint:
        plan, sites = self.plan, self.sites
        _shape_all(sites, plan, rate_mbit)
        # The step under way began on the other link.
        self._until(look, gates, gates[0].count() + 2, 2 * _STEP_LIMIT_S, "a step")
        before = sites.carried_bytes(plan.names[0])[0]
        busy, begin_s, done = _Busy(), time.monotonic(), gates[0].count()
        wait_s = plan.window_s

        def is_over() -> bool:
            _require_all(look.processes)
            enough = gates[0].count() >= done + plan.least_steps + 1
            return enough and time.monotonic() >= begin_s + wait_s

        look.until(is_over, wait_s + (plan.least_steps + 1) * _STEP_LIMIT_S, "a window")
        cores_busy, stamps = busy.share(), [gate.stamps() for gate in gates]
        sent_bytes = sites.carried_bytes(plan.names[0])[0] - before
        steps = len(stamps[0]) - done
        step_s = 1 / mean_rate(stamps, begin_s, time.monotonic())
        point = DataParallelPoint(
            rate_mbit=rate_mbit,
            steps=steps,
            step_s=round(step_s, 5),
            tokens_per_s=round(plan.learners * plan.tokens_per_step / step_s, 2),
            utilisation=round(plan.pace_s / step_s, 4),
            step_bytes=round(sent_bytes / steps),
            cores_busy=cores_busy,
        )
        self.tell(
            f"data-parallel at {rate_mbit:g} Mbit/s: {point.tokens_per_s:,.0f} tokens/s,"
            f" {point.utilisation:.1%} utilised, {steps} steps of {step_s:.3f} s"
        )
        return point

    def _until(
        self, look: Look, gates: Sequence[Gate], steps: int, limit_s: float, what: str
    ) -> None:
        def is_over() -> bool:
            _require_all(look.processes)
            return all(gate.count() >= steps for gate in gates)

        look.until(is_over, limit_s, what)


@dataclass(slots=True)
class _Decoupled:
    plan: ThinPlan
    sites: Sites
    stop: threading.Event
    tell: Callable[[str], None]

    def run(self) -> tuple[tuple[DecoupledPoint, ...], int]:
        """The points, and the model's number of parameters."""
        plan, sites = self.plan, self.sites
        out = plan.out / "decoupled"
        stamps = (out / "stamps").absolute()
        stamps.mkdir(parents=True)
        program = ProgramSettings(
            factory=gated.FACTORY, settings=gated.settings(stamps, plan.program)
        )
        spec = plan.spec.model_copy(update={"program": program})
        _shape_all(sites, plan, plan.rates_mbit[0])

        def entry(name: str) -> tuple[str, ...]:
            return command() if name == INIT else (*sites.words(name), *command())

        with Supervisor() as processes:
            cluster = Cluster(
                out, spec, None, self.stop, processes, entry=entry,
                terms=Terms(sites.address(SERVER), serve_flags=("--insecure",)),
                start_limit_s=START_LIMIT_S, at_tick=sites.require_alive,
            )  # fmt: skip
            cluster.make_run()
            cluster.start_compiling()
            cluster.serve()
            for name in plan.names:
                cluster.learn(Island(name, plan.pace_s))
            status = _Status(cluster, sites)
            pids = processes.pids()
            gates = [Gate(stamps, pids[name]) for name in plan.names]

            def is_warm() -> bool:
                _require_all(processes)
                return status.read() and all(gate.count() >= WARM_STEPS for gate in gates)

            cluster.until(is_warm, START_LIMIT_S, "the learners' start")
            points = tuple(self._point(cluster, status, gates, r) for r in plan.rates_mbit)
        return points, _parameters(cluster.run_dir)

    def _point(
        self, cluster: Cluster, status: _Status, gates: Sequence[Gate], rate_mbit: float
    ) -> DecoupledPoint:
        plan, sites = self.plan, self.sites
        _shape_all(sites, plan, rate_mbit)
        self._wait(cluster, SETTLE_S)
        places = (SERVER, *plan.names)
        before = {name: sites.carried_bytes(name) for name in places}
        status.read()
        busy, begin_s, then = _Busy(), time.monotonic(), status.newest
        self._wait(cluster, plan.window_s)
        status.read()
        end_s, now = time.monotonic(), status.newest
        cores_busy = busy.share()
        mbit = {
            name: max(b - a for a, b in zip(before[name], sites.carried_bytes(name), strict=True))
            * 8e-6
            / (end_s - begin_s)
            for name in places
        }
        stamps = [gate.stamps() for gate in gates]
        step_s = 1 / mean_rate(stamps, begin_s, end_s)
        slots = (now["global_step"] - then["global_step"]) * plan.fragments / plan.sync_interval
        trained = now["tokens_trained"] - then["tokens_trained"]
        point = DecoupledPoint(
            rate_mbit=rate_mbit,
            steps=round((end_s - begin_s) / step_s),
            step_s=round(step_s, 5),
            tokens_per_s=round(plan.learners * plan.tokens_per_step / step_s, 2),
            utilisation=round(plan.pace_s / step_s, 4),
            on_schedule=round((now["rounds_merged"] - then["rounds_merged"]) / slots, 4),
            merged_share=round((now["tokens_merged"] - then["tokens_merged"]) / trained, 4),
            learner_mbit=round(max(mbit[name] for name in plan.names), 3),
            server_mbit=round(mbit[SERVER], 3),
            cores_busy=cores_busy,
        )
        self.tell(
            f"Decoupled at {rate_mbit:g} Mbit/s: {point.tokens_per_s:,.0f} tokens/s,"
            f" {point.utilisation:.1%} utilised, {point.on_schedule:.0%} of the rounds on schedule,"
            f" {point.server_mbit:.2f} Mbit/s at the server"
        )
        return point

    def _wait(self, cluster: Cluster, seconds: float) -> None:
        end_s = time.monotonic() + seconds

        def is_over() -> bool:
            _require_all(cluster.processes)
            return time.monotonic() >= end_s

        cluster.until(is_over, seconds + START_LIMIT_S, "a window")


class _Status:
    """The run's status, followed by a process at the server's site."""

    def __init__(self, cluster: Cluster, sites: Sites) -> None:
        words = module("harness.status", cluster.address, str(_LOOK_S))
        argv = (*sites.words(SERVER), *words)
        self._log = cluster.log(_STATUS)
        self._at = 0
        self.newest: dict[str, Any] = {}
        cluster.processes.start(Command(_STATUS, argv, self._log, child_environment()))

    def read(self) -> bool:
        """Takes in what was said since; whether anything was ever."""
        with self._log.open("rb") as log:
            log.seek(self._at)
            *lines, rest = log.read().split(b"\n")
            self._at = log.tell() - len(rest)
        for line in lines[-1:]:
            self.newest = json.loads(line)
        return bool(self.newest)


class _Busy:
    """How much of this machine's processor time is in use, from here on."""

    def __init__(self) -> None:
        self._before = self._counts()

    def share(self) -> float:
        """Of all cores, until now."""
        used = [b - a for a, b in zip(self._before, self._counts(), strict=True)]
        return round(1 - (used[3] + used[4]) / max(1, sum(used)), 3)

    @staticmethod
    def _counts() -> list[int]:
        """Ticks of all cores: user, nice, system, idle, waiting for a disk, ..."""
        first = Path("/proc/stat").read_text("ascii").splitlines()[0]
        return [int(word) for word in first.split()[1:9]]


def _shape_all(sites: Sites, plan: ThinPlan, rate_mbit: float) -> None:
    for name in (SERVER, *plan.names):
        sites.shape(name, rate_mbit)


def _require_all(processes: Supervisor) -> None:
    """DilocoError, with its own last words, for one that has ended with an error."""
    for event in processes.events:
        if event.exit_code:
            processes.require_alive(event.name)


def _parameters(run_dir: Path) -> int:
    """Of the model in a run directory."""
    from outer_server.store.rundir import read_run

    return read_run(run_dir)[1].num_values
