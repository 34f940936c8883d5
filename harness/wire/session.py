"""One run of server and learners as processes, measured over a window in its middle."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.cluster import Cluster
from harness.environment import module
from harness.plan import SERVER, Island
from harness.processes import Supervisor
from harness.wire.plan import WirePlan
from harness.wire.readers import SlowReaders
from harness.wire.window import Reading, Window, least_merged, read
from services.client.status import fetch_status

_LOOK_S = 0.5
"""Between two looks at what is merged: each costs the server a connection."""
_TELL_S = 5.0

_STEP_S = 0.01
"""A learner's step: with steps that take no time one learner would run through many slots at once,
whose rounds the other one then misses."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A session's window, and where its bulk and control were served. `readers`: the ports of
    slow readers, who took `read_bytes` in all.
    """

    window: Window
    control_port: int
    bulk_port: int
    readers: frozenset[int]
    read_bytes: int


@dataclass(slots=True)
class Session:
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
                cluster.learn(Island(name, _STEP_S))
            lap = plan.fragments
            self._await_merged(cluster, plan.warm_up_laps * lap, "warming up")
            with SlowReaders(self._address, plan.slow_readers, lap) as readers:
                begin = self._read(cluster)
                merged = least_merged(begin.status)
                self._await_merged(cluster, merged + plan.laps * lap, "measuring", merged)
                end = self._read(cluster)
                address = (cluster.run_dir / "address.json").read_text(encoding="utf-8")
                bulk_port = int(json.loads(address)["bulk_port"])
                ports, read_bytes = readers.ports(bulk_port), readers.arrived_bytes
        control_port = int(self._address.rpartition(":")[2])
        return Measured(Window(begin, end), control_port, bulk_port, ports, read_bytes)

    @property
    def _probed(self) -> tuple[str, str]:
        # All learners are alike, and a look costs.
        return SERVER, self.plan.names[0]

    def _probe_report(self, name: str) -> Path:
        return self.plan.out / f"probe-{name}.json"

    def _entry(self, name: str) -> tuple[str, ...]:
        if name not in self._probed:
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
            merged = least_merged(status) if len(status.learners) == self.plan.learners else 0
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
            {name: self._probe_report(name) for name in self._probed},
            lambda is_over: cluster.until(is_over, 10.0, "a reading of the processes"),
        )
