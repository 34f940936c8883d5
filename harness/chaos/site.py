"""The units of a run as processes, each learner behind a link of its own: here or in containers,
by what supervises them and steers the links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.chaos.outages import Outage, OutageKind
from harness.chaos.steps import Steps
from harness.link import CLEAR, LinkShape, Steered
from harness.plan import SERVER
from harness.processes import Supervisor

JOIN_S = 3.0
"""So long before its next step a learner that returns sets about joining: compiled programs are
read, the newest weights fetched. Before that it is not seen, and nobody waits for it.
"""


@dataclass(slots=True)
class Units:
    """A `harness.chaos.breaker.Site`. `paces_s`: least seconds of a learner's step when nothing is
    wrong. `full`: the file whose presence fills the server's disk.

    `restart_s`: from the repair of a learner that was killed to its next step, however fast
    processes start here: its process is started at the kill, and held. None: for as long as it
    takes, from the repair on. `link`: what each learner's is when nothing is wrong.
    """

    processes: Supervisor
    links: Mapping[str, Steered]
    steps: Steps
    paces_s: Mapping[str, float]
    full: Path
    restart_s: float | None = None
    link: LinkShape = CLEAR
    _slowed: dict[str, float] = field(default_factory=dict)
    _back_at_s: dict[str, float] = field(default_factory=dict)

    def begin(self, outage: Outage) -> bool:
        """See `Site`."""
        whom = outage.whom
        if not self.processes.running(whom):
            return False
        match outage.what:
            case OutageKind.KILL if self.restart_s is not None:
                # What was held is not paced, so the next step follows at once: one pace later both
                # are made when two would have been.
                least_s = outage.for_s + self.restart_s + self.paces_s[whom]
                self._back_at_s[whom] = self.processes.now_s + least_s
                self.processes.kill(whom, str(outage.what))
            case OutageKind.KILL | OutageKind.SERVER_KILL:
                self.processes.kill(whom, str(outage.what), outage.for_s)
            case OutageKind.STOP:
                self.processes.pause(whom)
            case OutageKind.PARTITION:
                self.links[whom].cut()
            case OutageKind.RATE:
                rate_mbit = outage.mbit or self.link.rate_mbit
                self.links[whom].reshape(replace(self.link, rate_mbit=rate_mbit))
            case OutageKind.SLOW:
                self._slowed[whom] = self.paces_s[whom] * (outage.factor or 1.0)
            case OutageKind.DISK_FULL:
                self.full.touch()
        return True

    def end(self, outage: Outage) -> None:
        """See `Site`. A process that was killed comes back by itself."""
        whom = outage.whom
        match outage.what:
            case OutageKind.STOP:
                self.processes.resume(whom)
            case OutageKind.PARTITION:
                self.links[whom].mend()
            case OutageKind.RATE:
                self.links[whom].reshape(self.link)
            case OutageKind.SLOW:
                del self._slowed[whom]
                self.tick()
            case OutageKind.DISK_FULL:
                self.full.unlink(missing_ok=True)
            case _:
                pass

    def tick(self) -> None:
        """See `Site`."""
        pids, now_s = self.processes.pids(), self.processes.now_s
        self._back_at_s = {name: at_s for name, at_s in self._back_at_s.items() if now_s < at_s}
        to_come = {pids[n]: at_s - now_s for n, at_s in self._back_at_s.items() if n in pids}
        outside = {pid for pid, left_s in to_come.items() if left_s > JOIN_S}
        self.steps.hold_back(outside, set(to_come))
        self.steps.slow({pids[n]: s for n, s in self._slowed.items() if n in pids and n != SERVER})
