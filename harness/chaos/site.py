"""The units of a run as processes of this machine, each learner behind a link of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.chaos.outages import Outage, OutageKind
from harness.chaos.steps import Steps
from harness.link import Link, LinkShape
from harness.plan import SERVER
from harness.processes import Supervisor

CLEAR = LinkShape()
"""A link that does nothing to what it carries."""


@dataclass(slots=True)
class LocalSite:
    """A `harness.chaos.breaker.Site`. `paces_s`: least seconds of a learner's step when nothing is
    wrong. `full`: the file whose presence fills the server's disk.
    """

    processes: Supervisor
    links: Mapping[str, Link]
    steps: Steps
    paces_s: Mapping[str, float]
    full: Path
    _slowed: dict[str, float] = field(default_factory=dict)

    def begin(self, outage: Outage) -> bool:
        """See `Site`."""
        whom = outage.whom
        if not self.processes.running(whom):
            return False
        match outage.what:
            case OutageKind.KILL | OutageKind.SERVER_KILL:
                self.processes.kill(whom, str(outage.what), outage.for_s)
            case OutageKind.STOP:
                self.processes.pause(whom)
            case OutageKind.PARTITION:
                self.links[whom].cut()
            case OutageKind.RATE:
                self.links[whom].reshape(LinkShape(rate_mbit=outage.mbit or CLEAR.rate_mbit))
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
                self.links[whom].reshape(CLEAR)
            case OutageKind.SLOW:
                del self._slowed[whom]
                self.tick()
            case OutageKind.DISK_FULL:
                self.full.unlink(missing_ok=True)
            case _:
                pass

    def tick(self) -> None:
        """See `Site`."""
        pids = self.processes.pids()
        self.steps.slow({pids[n]: s for n, s in self._slowed.items() if n in pids and n != SERVER})
