"""The wire bench: the stages alone, then the whole path between real processes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from fragments.errors import DilocoError
from fragments.records import RunStatus
from harness.cluster import Cluster
from harness.environment import child_environment, module
from harness.plan import SERVER, Island
from harness.processes import Command, Supervisor
from harness.wire import ceilings
from harness.wire.ceiling import Ceiling
from harness.wire.plan import SMALL_PARAMS, WirePlan
from harness.wire.result import (
    RoundTrip,
    WireResult,
    hottest,
    limit_gb_per_s,
    peak_ratio,
    stage_costs,
)
from harness.wire.window import Reading, Window, bulk_traffic, lasting_traffic, read
from services.client.status import fetch_status

_STAGES_LIMIT_S = 180.0
_SMALL_LIMIT_S = 120.0
_LOOK_S = 0.5
"""Between two looks at what is merged: each costs the server a connection."""
_TELL_S = 5.0


@dataclass(slots=True)
class WireBench:
    """One bench. Leaves no process behind, however it ends. Call `run` once.

    `tell` gets a line now and then of what is going on.
    """

    plan: WirePlan
    stop: threading.Event
    tell: Callable[[str], None]
    _peaks: dict[str, int] = field(default_factory=dict)

    def run(self) -> WireResult:
        """Measures everything.

        Raises:
            StoppedError: when `stop` was set.
            SettingsError: when this machine has no room for it.
            DilocoError: when a process ended that should not, or something took too long.
        """
        plan = self.plan
        plan.require_room()
        found = self._ceilings()
        small = replace(
            plan, out=plan.out / "small", params=SMALL_PARAMS, laps=1, limit_s=_SMALL_LIMIT_S
        )
        self.tell(f"a run of {SMALL_PARAMS:,} parameters, for what processes take without a model")
        floor = _Session(small, self.stop, self.tell).measure().window.end
        self.tell(f"a run of {plan.params:,} parameters, {plan.learners} learners")
        session = _Session(replace(plan, out=plan.out / "run"), self.stop, self.tell).measure()
        return result(plan, found, floor, session)

    def _ceilings(self) -> dict[str, Ceiling]:
        """The stages of each side, one side after the other."""
        plan, found = self.plan, dict[str, Ceiling]()
        with Supervisor() as processes:
            cluster = Cluster(plan.out, plan.spec, None, self.stop, processes)
            for side in ceilings.SIDES:
                self.tell(f"stages alone: {side}")
                report = plan.out / f"{side}.json"
                argv = ceilings.argv(side, plan.learners, plan.spec, report)
                processes.start(Command(side, argv, cluster.log(side), _environment(side)))
                cluster.until(lambda s=side: processes.settled(s), _STAGES_LIMIT_S, side)  # type: ignore[misc]
                if processes.exit_code(side) != 0:
                    processes.require_alive(side)
                found |= ceilings.CEILINGS.validate_json(report.read_bytes())
        return found


def _environment(side: str) -> dict[str, str]:
    # The server adds to it what is its own arithmetic.
    return child_environment(every_core=side == "server")


@dataclass(frozen=True, slots=True)
class Measured:
    """A session's window, and where its bulk and control were served."""

    window: Window
    control_port: int
    bulk_port: int


@dataclass(slots=True)
class _Session:
    """One run of server and learners, measured over its window."""

    plan: WirePlan
    stop: threading.Event
    tell: Callable[[str], None]
    _address: str = ""

    def measure(self) -> Measured:
        """Starts the processes, waits for the warm-up, measures the laps, ends the processes."""
        plan = self.plan
        plan.out.mkdir(parents=True, exist_ok=True)
        with Supervisor() as processes:
            cluster = Cluster(
                plan.out, plan.spec, None, self.stop, processes,
                entry=self._entry, start_limit_s=plan.limit_s,
            )  # fmt: skip
            cluster.make_run()
            cluster.start_compiling()
            self._address = cluster.serve()
            for name in plan.names:
                cluster.learn(Island(name, 0.0))
            lap = plan.fragments
            self._await_merged(cluster, plan.warm_up_laps * lap, "warming up")
            begin = self._read(cluster)
            merged = _least_merged(begin.status)
            self._await_merged(cluster, merged + plan.laps * lap, "measuring", merged)
            end = self._read(cluster)
            place = json.loads((cluster.run_dir / "address.json").read_text(encoding="utf-8"))
        control_port = int(self._address.rpartition(":")[2])
        return Measured(Window(begin, end), control_port, int(place["bulk_port"]))

    def _probe_report(self, name: str) -> Path:
        return self.plan.out / f"probe-{name}.json"

    def _entry(self, name: str) -> tuple[str, ...]:
        if name != SERVER and name not in self.plan.names:
            return module("cli")
        return module("harness.wire.probe", str(self._probe_report(name)), "cli")

    def _await_merged(self, cluster: Cluster, wanted: int, what: str, before: int = 0) -> None:
        """Until each learner has had so many contributions merged."""
        looked_s = told_s = cluster.processes.now_s

        def is_over() -> bool:
            nonlocal looked_s, told_s
            for name in (SERVER, *self.plan.names):
                cluster.processes.require_alive(name)
            now_s = cluster.processes.now_s
            if now_s - looked_s < _LOOK_S:
                return False
            looked_s = now_s
            status = fetch_status(self._address)
            merged = _least_merged(status) if len(status.learners) == self.plan.learners else 0
            if now_s - told_s >= _TELL_S or merged >= wanted:
                told_s = now_s
                self.tell(f"  {what}: {merged - before} of {wanted - before} contributions each")
            return merged >= wanted

        cluster.until(is_over, self.plan.limit_s, what)

    def _read(self, cluster: Cluster) -> Reading:
        names = (SERVER, *self.plan.names)
        pids = {name: pid for name, pid in cluster.processes.pids().items() if name in names}
        return read(
            lambda: fetch_status(self._address),
            pids,
            {name: self._probe_report(name) for name in (SERVER, self.plan.names[0])},
            lambda is_over: cluster.until(is_over, 10.0, "a reading of the processes"),
        )


def result(
    plan: WirePlan, found: dict[str, Ceiling], floor: Reading, session: Measured
) -> WireResult:
    """What comes of the readings.

    Raises:
        DilocoError: when no round was merged, or a bulk connection broke.
    """
    window, learners = session.window, plan.learners
    pushed = window.grown(_contributions) * window.values // max(1, window.rounds)
    if pushed == 0:
        raise DilocoError("no contribution was merged while it was measured")
    # A learner pulls every version and takes part in nearly all; fragments are of one size.
    gb = 4 * pushed / learners / 1e9
    servers = (window.begin.probes[SERVER], window.end.probes[SERVER])
    bulk = bulk_traffic(*servers, port=session.bulk_port)
    control = lasting_traffic(*servers, port=session.control_port)
    bits_up = 8 * bulk.up_bytes / pushed
    bits_down = 8 * bulk.down_bytes / (window.values * learners)
    costs = stage_costs(found, learners, bits_up, bits_down)
    cores = len(os.sched_getaffinity(0))
    limit, rate = limit_gb_per_s(costs, learners, cores), gb / window.seconds
    params = sum(each.num_values for each in window.end.status.fragments)
    used_s, peaks = window.cpu_s(), window.end.peak_bytes
    ratios = {n: peak_ratio(peak, floor.peak_bytes[n], params) for n, peak in peaks.items()}
    trip = RoundTrip(
        params=params,
        learners=learners,
        fragments=plan.fragments,
        window_s=round(window.seconds, 2),
        rounds=window.rounds,
        rounds_abandoned=window.grown(lambda status: status.rounds_abandoned),
        contributions_late=window.grown(_late),
        fp32_gb_per_s_per_learner=round(rate, 4),
        limit_gb_per_s_per_learner=round(limit, 4),
        share_of_limit=round(rate / limit, 4),
        bits_up=round(bits_up, 4),
        bits_down=round(bits_down, 4),
        control_bytes_per_step=round(
            (control.up_bytes + control.down_bytes) / max(1, window.grown(_steps)), 1
        ),
        server_peak_ratio=round(ratios[SERVER], 3),
        learner_overhead_ratio=round(max(ratios[name] for name in plan.names), 3),
        cpu_s_per_gb_per_learner=round(sum(used_s.values()) / (gb * learners), 3),
        cpu_s={name: round(seconds, 2) for name, seconds in used_s.items()},
        peak_bytes=dict(peaks),
        load_average=round(os.getloadavg()[0], 2),
    )
    return WireResult(
        cores=cores,
        ceilings=found,
        round_trip=trip,
        stages_cpu_s_per_gb={name: round(cost, 4) for name, cost in costs.items()},
        profile={
            name: hottest(window.begin.probes[name].cpu_s, window.end.probes[name].cpu_s)
            for name in (SERVER, plan.names[0])
        },
    )


def _contributions(status: RunStatus) -> int:
    return sum(each.contributions_merged for each in status.learners)


def _least_merged(status: RunStatus) -> int:
    return min(each.contributions_merged for each in status.learners)


def _late(status: RunStatus) -> int:
    return sum(each.contributions_late for each in status.learners)


def _steps(status: RunStatus) -> int:
    return sum(each.steps for each in status.learners)
