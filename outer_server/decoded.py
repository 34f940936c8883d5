"""Contributions that were decoded to be checked, kept for the merge that needs them next."""

from __future__ import annotations

import threading

from fragments.payload import Payload
from outer_server.core.merge import Encoded


class Decoded:
    """Decoded payloads up to a bound in bytes; the oldest leave first. Thread-safe.

    Kept by the payload object itself, never by what it says of itself: what is taken out is what
    was decoded from that very payload.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[Payload, Encoded]] = {}
        self._held_bytes = 0

    def keep(self, payload: Payload, encoded: Encoded) -> None:
        """Keep it, if there is room at all for one of its size."""
        size = _size(encoded)
        if size > self._limit_bytes:
            return
        with self._lock:
            self._remove(payload)
            while self._held_bytes + size > self._limit_bytes:
                oldest, _ = next(iter(self._kept.values()))
                self._remove(oldest)
            # The entry holds the payload, so that no other object gets its id.
            self._kept[id(payload)] = (payload, encoded)
            self._held_bytes += size

    def take(self, payload: Payload) -> Encoded | None:
        """Take it out; None where it is not kept, or no more."""
        with self._lock:
            return self._remove(payload)

    def _remove(self, payload: Payload) -> Encoded | None:
        entry = self._kept.pop(id(payload), None)
        if entry is None:
            return None
        self._held_bytes -= _size(entry[1])
        return entry[1]


def _size(encoded: Encoded) -> int:
    return sum(array.nbytes for array in encoded)
