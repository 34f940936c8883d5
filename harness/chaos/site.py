"""The units of a run as processes of this machine, each learner behind a link of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from harness.chaos.outages import Outage, OutageKind
from harness.chaos.steps import Steps
from harness.link import Link, LinkShape
from harness.plan import SERVER
from harness.processes import Supervisor

_CLEAR = LinkShape()
"""A link that does nothing to what it carries."""

MOST_LINKS = 250
"""A link has an address of its own: 127.0.0.2 to 127.0.0.251."""


class Relays:
    """Every learner reaches the server through a relay of its own, which can be cut or slowed and
    counts what it carries. A context manager.

    Args:
        names: the learners.
        ports: the server's, on 127.0.0.1; each relay has the same ones on its own address.
    """

    def __init__(self, names: Sequence[str], ports: tuple[int, int]) -> None:
        if len(names) > MOST_LINKS:
            raise ValueError(f"more than {MOST_LINKS} links")
        self._hosts = {name: f"127.0.0.{number}" for number, name in enumerate(names, 2)}
        self._ports = ports
        self.links: dict[str, Link] = {}

    def __enter__(self) -> Relays:
        try:
            for name, host in self._hosts.items():
                self.links[name] = link = Link(host, _CLEAR)
                for port in self._ports:
                    link.open(("127.0.0.1", port))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def address(self, name: str, server: str) -> str:
        """Where a learner dials; the server's own address for who has no link."""
        return f"{self._hosts[name]}:{self._ports[0]}" if name in self._hosts else server

    def _close(self) -> None:
        for link in self.links.values():
            link.close()


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
                self.links[whom].reshape(LinkShape(rate_mbit=outage.mbit or _CLEAR.rate_mbit))
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
                self.links[whom].reshape(_CLEAR)
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
