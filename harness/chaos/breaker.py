"""Carries outages out when their moment comes, and ends them when they are to be over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from harness.chaos.outages import Outage


class Site(Protocol):
    """Where the units of a run are, and how they are broken: processes here, containers elsewhere.

    It touches nothing but what was started for this run.
    """

    def begin(self, outage: Outage) -> bool:
        """Break it; False where that cannot be now, because who is to suffer is not there."""

    def end(self, outage: Outage) -> None:
        """Repair it. Nothing happens where nothing is broken any more."""

    def tick(self) -> None:
        """Called often: whoever was started again suffers what its unit suffers."""


@dataclass(frozen=True, slots=True)
class Befell:
    """An outage as it was: on the clock that `Breaker.tick` is told."""

    outage: Outage
    began_s: float
    ended_s: float


@dataclass(slots=True)
class Breaker:
    """One unit suffers one thing at a time: what falls due meanwhile begins when that is over.
    One thread, which calls `tick` often.
    """

    outages: tuple[Outage, ...]
    site: Site
    tell: Callable[[str], None]
    befell: list[Befell] = field(default_factory=list)
    unbegun: tuple[Outage, ...] = ()
    _pending: list[Outage] = field(init=False)
    _active: dict[str, tuple[Outage, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pending = list(self.outages)

    def tick(self, now_s: float, tokens: float) -> None:
        """End what is over and begin what is due."""
        for unit, (outage, began_s) in list(self._active.items()):
            if now_s >= began_s + outage.for_s:
                self._end(unit, now_s)
        left = []
        for outage in self._pending:
            is_free = outage.whom not in self._active
            if is_free and outage.is_due(now_s, tokens) and self.site.begin(outage):
                self.tell(f"{now_s:.1f} s: {outage}")
                self._active[outage.whom] = outage, now_s
            else:
                left.append(outage)
        self._pending = left
        self.site.tick()

    def finish(self, now_s: float) -> None:
        """The run is over: repair everything, begin nothing more. `unbegun` is what never was its
        turn. Idempotent.
        """
        for unit in list(self._active):
            self._end(unit, now_s)
        self.unbegun += tuple(self._pending)
        self._pending = []

    def _end(self, unit: str, now_s: float) -> None:
        outage, began_s = self._active.pop(unit)
        self.site.end(outage)
        self.befell.append(Befell(outage, began_s, now_s))
