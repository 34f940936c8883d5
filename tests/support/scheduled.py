"""A scheduler with its state, and what it asked for, as tests of whole runs drive it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fragments.records import (
    PROTOCOL_VERSION,
    Adopted,
    Ask,
    ContributionKey,
    Hello,
    Phase,
    Report,
    Role,
    Version,
    Welcome,
)
from outer_server.core.events import (
    Contributed,
    Discard,
    Effect,
    Event,
    HasAdopted,
    Join,
    Merged,
    Note,
    Publish,
    Reply,
    Reported,
    Send,
    StartMerge,
)
from outer_server.core.scheduler import handle
from outer_server.core.state import (
    ContributionMeta,
    MergeOrder,
    RunState,
    new_state,
)
from tests.support.tiny import tiny_spec

LAYOUT = "layout"


class Run:
    """A scheduler with its state, and what it asked for so far."""

    def __init__(self, **spec: object) -> None:
        self.state: RunState = new_state(tiny_spec(**spec), ["d0", "d0"], generation=1)
        self.now_s = 0.0
        self.asks: list[tuple[str | None, Ask]] = []
        self.orders: list[MergeOrder] = []
        self.published: list[Publish] = []
        self.refusals: list[Note] = []
        self.discarded: list[ContributionKey] = []
        self.leases: dict[str, int] = {}

    def tell(self, event: Event) -> Reply:
        outcome = handle(self.state, event, self.now_s, LAYOUT)
        self.state = outcome.state
        for effect in outcome.effects:
            self._keep(effect)
        return outcome.reply

    def _keep(self, effect: Effect) -> None:
        match effect:
            case Send(learner, Ask() as ask):
                self.asks.append((learner, ask))
            case StartMerge(order):
                self.orders.append(order)
            case Publish():
                self.published.append(effect)
            case Note(what="contribution_refused"):
                self.refusals.append(effect)
            case Discard(keys):
                self.discarded += keys

    def join(self, name: str, incarnation: str = "1", **hello: Any) -> Reply:
        base = Hello(PROTOCOL_VERSION, "tiny", LAYOUT, name, Role.LEARNER, incarnation)
        reply = self.tell(Join(replace(base, **hello)))
        if isinstance(reply, Welcome):
            self.leases[name] = reply.lease.token
        return reply

    def phase(self) -> Phase:
        return self.state.phase

    def token(self, name: str) -> int:
        """That of the last lease granted to the name, 0 before it."""
        return self.leases.get(name, 0)

    def step(self, name: str, step: int) -> None:
        """Report every step up to `step`, as learners do."""
        first = self.state.learners[name].report.step + 1
        for now in range(first, step + 1):
            report = Report(step=now, tokens=16 * now, cursor=now)
            self.tell(Reported(name, self.token(name), report))

    def adopt(self, name: str, fragment: int) -> None:
        record = self.state.learners[name]
        version = Version(self.state.epoch, self.state.fragments[fragment].version)
        digest = self.state.fragments[fragment].digest
        adopted = Adopted(fragment, version, digest, record.report.step)
        self.tell(HasAdopted(name, record.token, adopted))

    def contribute(self, name: str, fragment: int, base: int, asked: int, text: str = "x") -> Reply:
        epoch = self.state.epoch
        key = ContributionKey(name, fragment, Version(epoch, base))
        meta = ContributionMeta(key, steps=2, tokens=32, cursor_from=0, cursor_to=2)
        event = Contributed(name, self.token(name), meta, Version(epoch, asked), text)
        return self.tell(event)

    def finish_merge(self, refused: str | None = None) -> None:
        order = self.orders.pop(0)
        version = order.version + 1
        self.tell(Merged(order.fragment, version, f"d{version}", order, refused))

    def trained(self, *names: str) -> None:
        for name in names:
            self.join(name)
            for fragment in range(2):
                self.adopt(name, fragment)
