"""A scheduler with its tape, as accounts of its data are made from."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import TypeAdapter

from fragments.records import Answered, ContributionKey, Version
from outer_server.core.events import Contributed, Effect, Event, Merged, Point, Reply, RollBack
from outer_server.core.intervals import Account, account
from outer_server.core.scheduler import handle
from outer_server.core.state import ContributionMeta, RunState
from tests.support.scheduled import LAYOUT, Run

STATE: TypeAdapter[RunState] = TypeAdapter(RunState)


class Taped(Run):
    """A scheduler with its tape; a contribution says where it begins and ends."""

    def __init__(self, **spec: object) -> None:
        super().__init__(**spec)
        self.tape: list[tuple[Event, Reply, Sequence[Effect]]] = []

    def tell(self, event: Event) -> Reply:
        outcome = handle(self.state, event, self.now_s, LAYOUT)
        self.tape.append((event, outcome.reply, outcome.effects))
        return super().tell(event)

    def push(self, name: str, start: int, stop: int, steps: int | None = None) -> Reply:
        """An answer for fragment 1 on its newest version."""
        version = Version(self.state.epoch, self.state.fragments[1].version)
        key = ContributionKey(name, 1, version)
        count = stop - start if steps is None else steps
        meta = ContributionMeta(key, count, 16 * count, start, stop)
        return self.tell(Contributed(name, self.token(name), meta, version, f"{start}-{stop}"))

    def exchange(self, *names: str) -> None:
        """Two more batches of each, merged and adopted."""
        starts = {name: self.state.learners[name].cursor for name in names}
        for name in names:
            self.step(name, self.state.learners[name].report.step + 2)
        for name, start in starts.items():
            self.push(name, start, start + 2)
        self.merge_all()
        for name in names:
            self.adopt(name, 1)

    def back(self, name: str, incarnation: str, cursor: int = 0) -> None:
        """Another process of this name joins, and pulls what is new."""
        self.join(name, incarnation, cursor=cursor)
        for fragment in range(2):
            self.adopt(name, fragment)

    def point(self, name: str) -> Point:
        """What a snapshot of this name says of now."""
        return Point.of(name, self.state)

    def roll_back(self, point: Point) -> None:
        assert isinstance(self.tell(RollBack(point, self.state.epoch + 1, "")), Answered)

    def snapshot(self) -> RunState:
        """The state, as it is read again."""
        text = json.dumps(STATE.dump_python(self.state, mode="json"))
        return STATE.validate_python(json.loads(text))

    def finish_merge(self, refused: str | None = None) -> None:
        """As a server does it: the epoch is told, and every value has a digest of its own."""
        order = self.orders.pop(0)
        epoch = order.contributions[0].key.base_version.epoch
        before = self.state.fragments[order.fragment].digest
        version, digest = order.version + 1, f"{epoch}.{order.version + 1}"
        digest = digest if refused is None else before
        self.tell(Merged(order.fragment, version, digest, order, refused, epoch))

    def merge_all(self, refused: str | None = None) -> None:
        while self.orders:
            self.finish_merge(refused)

    def account(self) -> Account:
        return account(self.tape)
