"""What is kept to be pulled: bounded, and once for all who read it."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fragments.errors import NonFiniteError
from fragments.payload import Payload
from fragments.records import Update, Version
from outer_server import publications
from outer_server.publications import CHAIN_LENGTH, CHAIN_SHARE, FULL_KEPT, Publications

VALUE = np.zeros((512, 4096), np.float32)


def payload(size: int) -> Payload:
    return Payload("any", size, 0, bytes(size))


def update(number: int, size: int = 10, fragment: int = 0) -> Update:
    base = Version(1, number - 1)
    return Update(fragment, Version(1, number), base, f"{number}", payload(size))


class Encoder:
    """Counts encodings, and how many there are at once."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def __call__(self, fragment: int, broadcast: object) -> Payload:
        with self._lock:
            self.calls.append(fragment)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        made = payload(1000)
        with self._lock:
            self.at_once -= 1
        return made


def shelves(count: int = 1) -> tuple[Publications, Encoder]:
    encoder = Encoder()
    made = Publications(encoder)
    for fragment in range(count):
        made.reset(fragment, Version(1, 0), "0", VALUE)
    return made, encoder


def test_a_chain_leads_on_from_a_version_that_is_kept_and_else_the_full_value() -> None:
    made, _ = shelves()
    assert made.updates(0, Version(1, 0)) == ()
    (full,) = made.updates(0, None)
    assert (full.version, full.from_version) == (Version(1, 0), None)
    for number in range(1, 4):
        made.publish(update(number), VALUE)
    assert [each.version.number for each in made.updates(0, Version(1, 1))] == [2, 3]
    (full,) = made.updates(0, Version(0, 1))
    assert (full.version.number, full.from_version) == (3, None)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (10, CHAIN_LENGTH),
        (VALUE.nbytes // CHAIN_SHARE // 3, 3),
        (VALUE.nbytes // CHAIN_SHARE, 1),
        (VALUE.nbytes, 1),
    ],
)
def test_a_chain_is_bounded_in_length_and_bytes(size: int, expected: int) -> None:
    made, _ = shelves()
    for number in range(1, 2 * CHAIN_LENGTH):
        made.publish(update(number, size), VALUE)
        assert made.updates(0, Version(1, number - 1))[-1].version.number == number
    kept = [
        n for n in range(2 * CHAIN_LENGTH - 1) if made.updates(0, Version(1, n))[0].from_version
    ]
    assert len(kept) == expected


def test_many_readers_of_a_full_value_hold_it_once() -> None:
    made, encoder = shelves(8)
    with ThreadPoolExecutor(16) as pool:
        held = list(pool.map(lambda n: made.updates(n % 8, None)[0], range(64)))
    assert sorted(encoder.calls) == list(range(8))
    assert encoder.most_at_once == 1
    assert len({id(each.payload.data) for each in held}) == 8


def test_a_full_value_that_nobody_reads_is_let_go() -> None:
    made, encoder = shelves(FULL_KEPT + 2)
    alive = [weakref.ref(made.updates(fragment, None)[0]) for fragment in range(FULL_KEPT + 2)]
    gc.collect()
    assert [each() is not None for each in alive] == [False, False] + [True] * FULL_KEPT
    made.publish(update(1, fragment=FULL_KEPT + 1), VALUE)
    assert alive[-1]() is None
    made.updates(0, None)
    assert encoder.calls.count(0) == 2


def test_a_value_that_cannot_be_encoded_is_said_to_all_who_ask() -> None:
    def broken(fragment: int, broadcast: object) -> Payload:
        raise NonFiniteError("not finite")

    made = publications.Publications(broken)
    made.reset(0, Version(1, 0), "0", VALUE)
    for _ in range(2):
        with pytest.raises(NonFiniteError):
            made.updates(0, None)
