"""Where versions come faster than they can be pulled, every fragment has its turn all the same."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from fragments.records import Published, Version
from learner.inbox import Inbox

FRAGMENTS = 4
ENOUGH = 40


class Flooded:
    """An island, a link and a session in one: while a fragment is pulled, a newer version of each
    is published.
    """

    def __init__(self) -> None:
        self.published = 1
        self.held = dict.fromkeys(range(FRAGMENTS), Version(1, 0))
        self.pulled: list[int] = []
        self.arrived_bytes = 0
        self.lease = self.failure = None
        self.completed = SimpleNamespace(step=0)
        self.is_enough = threading.Event()
        self.inbox: Inbox | None = None

    def newest_version(self, fragment: int) -> Version:
        return self.held[fragment]

    def pull(self, _lease: object, fragment: int, _have: Version | None) -> tuple[Any, ...]:
        newest = Version(1, self.published)
        self.publish()
        self.pulled.append(fragment)
        if len(self.pulled) == ENOUGH:
            self.is_enough.set()
        return (SimpleNamespace(fragment=fragment, version=newest),)

    def prepare(self, update: Any) -> None:
        self.held[update.fragment] = update.version

    def publish(self) -> None:
        assert self.inbox is not None
        self.published += 1
        for fragment in range(FRAGMENTS):
            self.inbox.want(Published(fragment, Version(1, self.published)))


def _flooded() -> tuple[Flooded, Inbox]:
    world = Flooded()
    inbox = world.inbox = Inbox(cast(Any, world), cast(Any, world), cast(Any, world))
    world.publish()
    return world, inbox


def test_every_fragment_has_its_turn() -> None:
    world, inbox = _flooded()
    inbox.start()
    assert world.is_enough.wait(20)
    inbox.stop()
    counts = [world.pulled[:ENOUGH].count(fragment) for fragment in range(FRAGMENTS)]
    assert counts == [ENOUGH // FRAGMENTS] * FRAGMENTS


def test_who_begins_waits_for_what_was_newest_then_not_for_ever() -> None:
    world, inbox = _flooded()
    newest = inbox.wanted
    inbox.start()
    assert inbox.wait_prepared(newest, 20)
    assert all(world.held[fragment] >= version for fragment, version in newest.items())
    assert inbox.wanted, "there is always one more"
    inbox.stop()
