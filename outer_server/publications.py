"""What may be pulled: the newest version of each fragment, and the way to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from fragments.payload import Payload
from fragments.records import Update, Version

CHAIN_LENGTH = 8
"""Updates kept per fragment. One update is about a tenth of a full value, so a longer chain
would cost who is behind more than the full value."""


class _Once:
    """A value made by whoever asks first; all others wait for that."""

    def __init__(self, make: Callable[[], Payload]) -> None:
        self._make = make
        self._claim = threading.Lock()
        self._value: Future[Payload] = Future()

    def get(self) -> Payload:
        if self._claim.acquire(blocking=False):
            try:
                self._value.set_result(self._make())
            except Exception as error:  # noqa: BLE001  every waiting reader must hear of it
                self._value.set_exception(error)
        return self._value.result()


@dataclass(frozen=True, slots=True)
class _Shelf:
    """One fragment: newest version, the chain of updates to it, and its full value."""

    version: Version
    digest: str
    chain: tuple[Update, ...]
    full: _Once


class Publications:
    """Immutable updates, shared by all readers. Thread-safe: a reader takes one reference.

    Args:
        encode_full: (fragment, broadcast copy) -> exact payload.
    """

    def __init__(self, encode_full: Callable[[int, Any], Payload]) -> None:
        self._encode_full = encode_full
        self._shelves: dict[int, _Shelf] = {}

    def reset(self, fragment: int, version: Version, digest: str, broadcast: Any) -> None:
        """Put out a version without a way from earlier ones (at start)."""
        full = self._once(fragment, broadcast)
        self._shelves[fragment] = _Shelf(version, digest, (), full)

    def publish(self, update: Update, broadcast: Any) -> None:
        """Put out a new version; `broadcast` is its full value, encoded when first wanted."""
        chain = (*self._shelves[update.fragment].chain, update)[-CHAIN_LENGTH:]
        full = self._once(update.fragment, broadcast)
        shelf = _Shelf(update.version, update.digest, chain, full)
        self._shelves[update.fragment] = shelf

    def updates(self, fragment: int, have: Version | None) -> tuple[Update, ...]:
        """What leads from `have` to the newest version, oldest first; () where it is the newest.

        A chain of updates where one is kept, otherwise the full value, encoded by the first who
        wants it. Raises whatever `encode_full` raised.
        """
        shelf = self._shelves[fragment]
        if have == shelf.version:
            return ()
        froms = [update.from_version for update in shelf.chain]
        if have is not None and have in froms:
            return shelf.chain[froms.index(have) :]
        return (Update(fragment, shelf.version, None, shelf.digest, shelf.full.get()),)

    def _once(self, fragment: int, broadcast: Any) -> _Once:
        return _Once(lambda: self._encode_full(fragment, broadcast))
