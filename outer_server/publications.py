"""What may be pulled: the newest version of each fragment, and the way to it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fragments.payload import Payload
from fragments.records import Update, Version

CHAIN_LENGTH = 8
"""Updates kept per fragment, at most. One update is about a tenth of a full value, so a longer
chain would cost who is behind more than the full value."""

CHAIN_SHARE = 6
CHAIN_LEAST_BYTES = 1 << 18
"""Those that are kept have at most one CHAIN_SHARE-th of the bytes of the value, or these: two
updates in the default codec, for learners that miss a version. All eight were half a model."""

FULL_KEPT = 2
"""Encoded full values kept though nobody reads them: newcomers ask for the fragments in one order,
and who comes a little later finds what the one before had encoded."""


@dataclass(frozen=True, slots=True)
class _Shelf:
    """One fragment: newest version, the chain of updates to it, its broadcast copy, and the full
    value, as long as somebody else holds it.
    """

    version: Version
    digest: str
    chain: tuple[Update, ...]
    broadcast: Any
    full: weakref.WeakValueDictionary[int, Update]


class Publications:
    """Immutable updates, shared by all readers: 64 that read one update hold it once. Thread-safe:
    a reader takes one reference.

    Args:
        encode_full: (fragment, broadcast copy) -> exact payload.
    """

    def __init__(self, encode_full: Callable[[int, Any], Payload]) -> None:
        self._encode_full = encode_full
        self._shelves: dict[int, _Shelf] = {}
        # One encoding at a time: it takes several times the fragment.
        self._encoding = threading.Lock()
        self._kept_lock = threading.Lock()
        self._full_kept: list[Update] = []

    def reset(self, fragment: int, version: Version, digest: str, broadcast: Any) -> None:
        """Put out a version without a way from earlier ones (at start)."""
        self._shelves[fragment] = _shelf(version, digest, (), broadcast)

    def publish(self, update: Update, broadcast: Any) -> None:
        """Put out a new version; `broadcast` is its full value, encoded when first wanted."""
        chain = _bounded((*self._shelves[update.fragment].chain, update), broadcast)
        self._shelves[update.fragment] = _shelf(update.version, update.digest, chain, broadcast)
        with self._kept_lock:
            kept = [each for each in self._full_kept if each.fragment != update.fragment]
            self._full_kept = kept

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
        return (self._full(fragment, shelf),)

    def _full(self, fragment: int, shelf: _Shelf) -> Update:
        update = shelf.full.get(fragment)
        if update is not None:
            return update
        with self._encoding:
            # Who waited here may find what it was waiting for.
            update = shelf.full.get(fragment)
            if update is None:
                payload = self._encode_full(fragment, shelf.broadcast)
                update = Update(fragment, shelf.version, None, shelf.digest, payload)
                shelf.full[fragment] = update
                with self._kept_lock:
                    self._full_kept = [*self._full_kept, update][-FULL_KEPT:]
        return update


def _shelf(version: Version, digest: str, chain: tuple[Update, ...], broadcast: Any) -> _Shelf:
    return _Shelf(version, digest, chain, broadcast, weakref.WeakValueDictionary())


def _bounded(chain: tuple[Update, ...], broadcast: Any) -> tuple[Update, ...]:
    """The newest updates, as many as are kept; always the last one."""
    left_bytes = max(broadcast.nbytes // CHAIN_SHARE, CHAIN_LEAST_BYTES)
    kept = 0
    for update in reversed(chain[-CHAIN_LENGTH:]):
        left_bytes -= len(update.payload.data)
        if kept and left_bytes < 0:
            break
        kept += 1
    return chain[-kept:]
