"""Faults by logical step: kill a learner with -9 when it has made so many steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from fragments.errors import SettingsError
from fragments.records import RunStatus

_ORDER = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+)@(?P<step>[0-9]+)$")


@dataclass(frozen=True, slots=True)
class KillOrder:
    """Kill the learner `name` as soon as its steps in the run reach `step`."""

    name: str
    step: int

    def __str__(self) -> str:
        return f"{self.name}@{self.step}"


def parse_kills(texts: Sequence[str], names: Sequence[str]) -> tuple[KillOrder, ...]:
    """Kill orders from texts such as "us-east@120".

    Raises:
        SettingsError: for another form, or a name that is none of `names`.
    """
    orders = []
    for text in texts:
        match = _ORDER.match(text)
        if match is None:
            raise SettingsError(f"--kill {text}: give NAME@STEP, such as {names[0]}@120")
        if match["name"] not in names:
            raise SettingsError(
                f"--kill {text}: there is no learner {match['name']}; there are {', '.join(names)}"
            )
        orders.append(KillOrder(match["name"], int(match["step"])))
    return tuple(orders)


@dataclass(slots=True)
class Drill:
    """Which orders are still to be carried out."""

    orders: tuple[KillOrder, ...]
    _pending: list[KillOrder] = field(init=False)

    def __post_init__(self) -> None:
        self._pending = sorted(self.orders, key=lambda order: order.step)

    def due(self, status: RunStatus) -> list[KillOrder]:
        """The orders that this status makes due; each is returned once."""
        steps = {learner.name: learner.steps for learner in status.learners}
        due = [order for order in self._pending if steps.get(order.name, -1) >= order.step]
        self._pending = [order for order in self._pending if order not in due]
        return due
