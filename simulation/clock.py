"""Virtual time: a heap of events, handled in one fixed order. Nothing here sleeps."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from fragments.errors import DilocoError

MAX_EVENTS = 20_000_000
"""A run that needs more than this goes round in circles."""


class StalledError(DilocoError):
    """A simulated run that can never end: nothing is left to happen, or it goes in circles."""


class Order(IntEnum):
    """Which of the events of one instant comes first.

    Learners of equal speed end their steps at the same instant: all have ended them before the
    first report of it is heard, and all hear what their reports set off before the next begins.
    """

    COMPLETION = 0
    ARRIVAL = 1
    TIMER = 2
    BEGIN = 3


@dataclass(slots=True)
class Scheduled:
    """An event to come. `cancel` it and it will not happen."""

    at_s: float
    action: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        """Make it not happen; harmless after it did."""
        self.cancelled = True


@dataclass(order=True, slots=True)
class _Entry:
    at_s: float
    order: int
    sequence: int
    event: Scheduled = field(compare=False)


class VirtualClock:
    """Seconds since the run's birth, and what happens when.

    Events of one instant happen by `Order`, then in the order in which they were scheduled: a run
    is a pure function of its inputs.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[_Entry] = []
        self._sequence = 0

    def at(self, at_s: float, order: Order, action: Callable[[], None]) -> Scheduled:
        """Have `action` called at `at_s`, or now where that is past."""
        event = Scheduled(max(at_s, self.now_s), action)
        heapq.heappush(self._heap, _Entry(event.at_s, order, self._sequence, event))
        self._sequence += 1
        return event

    def after(self, delay_s: float, order: Order, action: Callable[[], None]) -> Scheduled:
        """Have `action` called `delay_s` from now."""
        return self.at(self.now_s + delay_s, order, action)

    def run(self, done: Callable[[], bool], limit_s: float = math.inf) -> None:
        """Handle events until `done()`, which is looked at after each.

        Raises StalledError when nothing is left to happen, when virtual time would pass
        `limit_s`, or after MAX_EVENTS events.
        """
        handled = 0
        while not done():
            if not self._heap:
                raise StalledError(f"nothing is left to happen at {self.now_s:.1f} s")
            entry = heapq.heappop(self._heap)
            if entry.event.cancelled:
                continue
            if entry.at_s > limit_s or handled >= MAX_EVENTS:
                raise StalledError(f"the run is not over at {self.now_s:.1f} s")
            self.now_s = entry.at_s
            entry.event.action()
            handled += 1
