"""The wire bench: the stages alone, then the whole path between real processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.cluster import Cluster
from harness.environment import child_environment
from harness.processes import Command, Supervisor
from harness.wire import ceilings
from harness.wire.ceiling import Ceiling
from harness.wire.figures import figures
from harness.wire.plan import SMALL_PARAMS, WirePlan
from harness.wire.result import WireResult
from harness.wire.session import Session

_STAGES_LIMIT_S = 180.0
_SMALL_LIMIT_S = 120.0


@dataclass(slots=True)
class WireBench:
    """One bench. Leaves no process behind, however it ends. Call `run` once.

    `tell` gets a line now and then of what is going on.
    """

    plan: WirePlan
    stop: threading.Event
    tell: Callable[[str], None]

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
        floor = Session(small, self.stop, self.tell).measure().window.end
        self.tell(f"a run of {plan.params:,} parameters, {plan.learners} learners")
        measured = Session(replace(plan, out=plan.out / "run"), self.stop, self.tell).measure()
        return figures(plan, found, floor, measured)

    def _ceilings(self) -> dict[str, Ceiling]:
        """The stages of each side, one side after the other."""
        plan, found = self.plan, dict[str, Ceiling]()
        with Supervisor() as processes:
            cluster = Cluster(plan.out, plan.spec, None, self.stop, processes)
            for side in ceilings.SIDES:
                self.tell(f"stages alone: {side}")
                found |= self._side(cluster, side)
        return found

    def _side(self, cluster: Cluster, side: str) -> dict[str, Ceiling]:
        plan, processes = self.plan, cluster.processes
        report = plan.out / f"{side}.json"
        argv = ceilings.argv(side, plan.learners, plan.spec, report)
        processes.start(Command(side, argv, cluster.log(side), child_environment()))
        cluster.until(lambda: processes.settled(side), _STAGES_LIMIT_S, f"measuring {side} stages")
        if processes.exit_code(side) != 0:
            processes.require_alive(side)
        return ceilings.CEILINGS.validate_json(report.read_bytes())
