"""Learners as they keep their data: which batches of a shard are in which contribution, and what a
checkpoint of them holds. They train nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fragments.records import (
    Adopted,
    ContributionKey,
    HeldBase,
    Receipt,
    Report,
    Version,
    Welcome,
)
from outer_server.core.events import Contributed, HasAdopted, Reported
from outer_server.core.membership import check_lease
from outer_server.core.receive import DROPPED, admissible
from outer_server.core.state import ContributionMeta
from tests.support.taped import Taped

FRAGMENTS = 2
TOKENS = 16
"""Of a step."""


@dataclass(frozen=True)
class Held:
    """A base, and what was trained since it was adopted: batches of the shard, a step each."""

    version: Version
    cursor: int
    batches: tuple[int, ...] = ()


@dataclass(frozen=True)
class Counted:
    """What a checkpoint holds."""

    step: int = 0
    cursor: int = 0
    shard: int = -1
    bases: tuple[Held | None, ...] = (None,) * FRAGMENTS


@dataclass
class Island:
    """A process of a learner; `kept` is its newest checkpoint. `truth` is told of the batches that
    are in what it sends.
    """

    name: str
    run: Taped
    truth: dict[ContributionKey, frozenset[int]]
    incarnation: int = 0
    now: Counted = Counted()
    kept: Counted = Counted()
    consumed: dict[int, Version] = field(default_factory=dict)
    is_placed: bool = False
    sent: Contributed | None = None

    def die(self, *, with_checkpoint: bool) -> None:
        """The next process, before it joins."""
        self.incarnation += 1
        self.is_placed, self.consumed, self.sent = False, {}, None
        self.kept = self.kept if with_checkpoint else Counted()
        self.now = self.kept

    def join(self) -> bool:
        """Join, the first time or again, and go on where the server says."""
        said, held = self.now.cursor, tuple[HeldBase, ...]()
        if self.is_placed:
            held = tuple(
                HeldBase(index, base.version, len(base.batches), TOKENS * len(base.batches))
                for index, base in enumerate(self.now.bases)
                if base is not None
            )
        reply = self.run.join(self.name, str(self.incarnation), cursor=said, bases=held)
        if not isinstance(reply, Welcome):
            return False
        for fragment, number in enumerate(reply.consumed):
            self.consumed[fragment] = Version(reply.epoch, number)
        if not self.is_placed:
            self._begin(reply)
        elif reply.shard_index != self.now.shard or reply.cursor > said:
            self._move(reply)
        self.is_placed = True
        return True

    def _begin(self, welcome: Welcome) -> None:
        newest = [Version(welcome.epoch, number) for number in welcome.versions]
        bases = tuple(
            base if base is not None and base.version == version else None
            for base, version in zip(self.now.bases, newest, strict=True)
        )
        is_there = self.now.shard == welcome.shard_index
        self.now = replace(self.now, bases=bases, shard=welcome.shard_index, cursor=welcome.cursor)
        if not is_there:
            self._drop()

    def _move(self, welcome: Welcome) -> None:
        cursor = welcome.cursor
        if welcome.shard_index == self.now.shard:
            cursor = max(cursor, self.now.cursor)
        self.now = replace(self.now, shard=welcome.shard_index, cursor=cursor)
        self._drop()

    def _drop(self) -> None:
        """What was trained since its bases is given up."""
        bases = (
            None if base is None else Held(base.version, self.now.cursor) for base in self.now.bases
        )
        self.now = replace(self.now, bases=tuple(bases))

    def train(self, steps: int, *, is_told: bool) -> None:
        """So many batches."""
        for _ in range(steps):
            at = self.now.cursor
            bases = (
                None if base is None else replace(base, batches=(*base.batches, at))
                for base in self.now.bases
            )
            self.now = replace(self.now, step=self.now.step + 1, cursor=at + 1, bases=tuple(bases))
        if is_told:
            self.report()

    def report(self) -> None:
        report = Report(step=self.now.step, tokens=TOKENS * self.now.step, cursor=self.now.cursor)
        self.run.tell(Reported(self.name, self.run.token(self.name), report))

    def adopt(self, fragment: int) -> None:
        """Take the newest version, where it is not held. Who has no lease is told of none."""
        state, held = self.run.state, self.now.bases[fragment]
        if check_lease(state, self.name, self.run.token(self.name)) is not None:
            return
        newest = Version(state.epoch, state.fragments[fragment].version)
        if held is None or held.version != newest:
            bases = list(self.now.bases)
            bases[fragment] = Held(newest, self.now.cursor)
            self.now = replace(self.now, bases=tuple(bases))
        digest = state.fragments[fragment].digest
        adopted = Adopted(fragment, newest, digest, self.now.step)
        self.run.tell(HasAdopted(self.name, self.run.token(self.name), adopted))

    def answer(self, fragment: int) -> None:
        """Send what was trained since the base, as if asked; also late."""
        base, state = self.now.bases[fragment], self.run.state
        consumed = self.consumed.get(fragment, Version(0, -1))
        if base is None or not base.batches or base.version <= consumed:
            return
        if base.version.epoch != state.epoch:
            return
        self.consumed[fragment] = base.version
        key = ContributionKey(self.name, fragment, base.version)
        steps = len(base.batches)
        meta = ContributionMeta(key, steps, TOKENS * steps, base.cursor, self.now.cursor)
        asked = Version(state.epoch, state.fragments[fragment].version)
        digest = f"{self.incarnation} {base.batches}"
        event = Contributed(self.name, self.run.token(self.name), meta, asked, digest)
        if admissible(state, event) not in (None, DROPPED):
            # A push outruns no report where it is not taken.
            self.report()
        self.sent = event
        reply = self.run.tell(event)
        if isinstance(reply, Receipt) and not reply.duplicate:
            self.truth[key] = frozenset(base.batches)

    def repeat(self) -> None:
        """Send the last contribution again: its acknowledgement was lost."""
        if self.sent is not None:
            self.sent = replace(self.sent, token=self.run.token(self.name))
            self.run.tell(self.sent)
