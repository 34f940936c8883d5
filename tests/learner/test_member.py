"""What a member makes of versions that it hears of: from a grant, and from notes on the stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from fragments.digest import digest_hex
from fragments.payload import encode_f32
from fragments.records import (
    Adopted,
    Contribution,
    Decline,
    Evaluation,
    Goodbye,
    Hello,
    Lease,
    Phase,
    Published,
    Receipt,
    RefusalCode,
    Report,
    Role,
    RunDescription,
    ServerNote,
    Update,
    Version,
    Welcome,
)
from learner.member import Member
from tests.support.tiny import TinyProgram, tiny_birth, tiny_spec

WAIT_S = 30.0

SPEC = tiny_spec()
LAYOUT, VALUES = tiny_birth(SPEC)


class Line:
    """A stream of which nothing is looked at."""

    def report(self, report: Report) -> None:
        pass

    def decline(self, decline: Decline) -> None:
        pass

    def adopted(self, adopted: Adopted) -> None:
        pass

    def evaluated(self, evaluation: Evaluation) -> None:
        pass

    def close(self) -> None:
        pass


class TalkingLink:
    """A server of one fragment's history: `number` is its newest version, the other stays at 0.

    A test says notes through it, and sees what is pulled.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived_bytes = 0
        self.pulls: queue.SimpleQueue[tuple[int, Version | None]] = queue.SimpleQueue()
        self.hold = threading.Event()
        self.hold.set()
        self.streams: queue.SimpleQueue[tuple[Callable[[ServerNote], None], Callable[[], None]]] = (
            queue.SimpleQueue()
        )

    def describe(self) -> RunDescription:
        spec, layout = SPEC.model_dump_json(), LAYOUT.to_json()
        return RunDescription("tiny", 1, spec, layout, LAYOUT.digest, 0, "", 1, 1, Phase.TRAINING)

    def join(self, hello: Hello) -> Welcome:
        lease = Lease(hello.name, 1, 15.0)
        versions, consumed = (self.number, 0), (-1, -1)
        return Welcome(lease, 1, 1, Phase.TRAINING, versions, consumed, 0, 1, 0, 0, 0, 5.0)

    def open_control(
        self, lease: Lease, on_note: Callable[[ServerNote], None], on_closed: Callable[[], None]
    ) -> Line:
        self.streams.put((on_note, on_closed))
        return Line()

    def push(self, lease: Lease, contribution: Contribution) -> Receipt:
        return Receipt(contribution.key)

    def pull(self, lease: Lease, fragment: int, have: Version | None) -> tuple[Update, ...]:
        number = self.number if fragment == 0 else 0
        self.pulls.put((fragment, have))
        self.hold.wait(WAIT_S)
        value = VALUES[fragment] + np.float32(number / 1000) * (VALUES[fragment] != 0)
        digest = digest_hex(jnp.asarray(value))
        payload = encode_f32(LAYOUT.fragments[fragment], value)
        return (Update(fragment, Version(1, number), None, digest, payload),)

    def leave(self, lease: Lease, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def _joined(link: TalkingLink) -> Member:
    member = Member(
        "a",
        Role.LEARNER,
        TinyProgram(),
        link,
        link.describe(),
        on_ask=lambda _: None,
        on_attached=lambda: None,
    )
    assert member.join(threading.Event()) is not None
    assert [link.pulls.get(timeout=WAIT_S) for _ in range(2)] == [(0, None), (1, None)]
    return member


def test_a_note_of_an_older_version_is_late_and_nothing_else() -> None:
    link = TalkingLink(3)
    member = _joined(link)
    on_note, _ = link.streams.get(timeout=WAIT_S)
    on_note(Published(0, Version(1, 2)))
    link.number = 4
    on_note(Published(0, Version(1, 4)))
    assert link.pulls.get(timeout=WAIT_S) == (0, Version(1, 3)), "what is held is built on"
    assert member.inbox.wait_prepared(member.inbox.wanted, WAIT_S)
    assert member.island.newest_version(0) == Version(1, 4)
    assert link.pulls.empty()
    member.close("done")


def test_a_late_note_does_not_replace_the_newer_one_that_is_waited_for() -> None:
    link = TalkingLink(3)
    member = _joined(link)
    on_note, _ = link.streams.get(timeout=WAIT_S)
    link.number = 4
    link.hold.clear()
    on_note(Published(0, Version(1, 4)))
    link.pulls.get(timeout=WAIT_S)
    # While version 4 is under way, 5 is published, and it is heard of before an older one.
    link.number = 5
    on_note(Published(0, Version(1, 5)))
    on_note(Published(0, Version(1, 4)))
    link.hold.set()
    assert link.pulls.get(timeout=WAIT_S) == (0, Version(1, 4))
    assert member.inbox.wait_prepared(member.inbox.wanted, WAIT_S)
    assert member.island.newest_version(0) == Version(1, 5)
    member.close("done")


def test_a_grant_of_an_older_version_is_of_another_copy_of_the_run() -> None:
    link = TalkingLink(3)
    member = _joined(link)
    on_note, on_closed = link.streams.get(timeout=WAIT_S)
    link.number = 2
    on_note(Goodbye(RefusalCode.LEASE_LOST, "join again"))
    on_closed()
    assert link.pulls.get(timeout=WAIT_S) == (0, None), "what is held is no base there"
    assert member.inbox.wait_prepared(member.inbox.wanted, WAIT_S)
    assert member.island.newest_version(0) == Version(1, 2)
    member.close("done")
