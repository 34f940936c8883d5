"""Caps in Mbit/s: the token bucket, and one direction of a process's bulk traffic that obeys it.

Counted are serialized messages; TCP and IP add about 4% to them on packets of 1500 bytes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

BYTES_PER_MBIT = 1e6 / 8

DEPTH_S = 0.1
"""Of the cap: what may pass at once after a pause, and so the largest chunk. It is also the longest
oversleep that is made good, and a busy machine's timers are tens of milliseconds late."""

WINDOW_S = 0.2
"""Of the cap: what may be on its way to a reader that holds back. As long as most round trips, so
that a window does not slow a long link, and with DEPTH_S well within 5% of 10 s."""

WINDOW_LIMIT_BYTES = 16 << 20
STREAM_WINDOW_BYTES = 64 << 10
"""HTTP/2's own: what each of several streams may have on its way at least."""

USE_WINDOW_S = 10.0
_SLOT_S = 0.5


@dataclass(frozen=True, slots=True)
class Bucket:
    """A token bucket, as a value. `level_bytes` is negative while takers wait.

    It holds at most DEPTH_S of its rate. What passes in any window of w seconds is at most
    `rate_bytes_s` * (w + DEPTH_S), provided that takers wait as they are told.
    """

    rate_bytes_s: float
    level_bytes: float
    at_s: float

    @classmethod
    def full(cls, rate_bytes_s: float, now_s: float) -> Bucket:
        """One that nobody has taken from yet."""
        return cls(rate_bytes_s, rate_bytes_s * DEPTH_S, now_s)

    def take(self, num_bytes: int, now_s: float) -> tuple[Bucket, float]:
        """The bucket after a take, and the seconds until it may pass: first come, first served."""
        gained = max(0.0, now_s - self.at_s) * self.rate_bytes_s
        level = min(self.rate_bytes_s * DEPTH_S, self.level_bytes + gained) - num_bytes
        bucket = Bucket(self.rate_bytes_s, level, max(self.at_s, now_s))
        return bucket, max(0.0, -level / self.rate_bytes_s)


class Meter:
    """Bytes a second over the last USE_WINDOW_S, or since the beginning where that is shorter.

    Not thread-safe. Times are given, and must not fall.
    """

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._slots: deque[tuple[int, int]] = deque()
        """(number of a slot of _SLOT_S, bytes in it), oldest first."""

    def count(self, num_bytes: int, now_s: float) -> None:
        """So many bytes have passed."""
        slot = int(now_s / _SLOT_S)
        before = 0
        if self._slots and self._slots[-1][0] == slot:
            before = self._slots.pop()[1]
        self._slots.append((slot, before + num_bytes))
        self._forget(slot)

    def rate_bytes_s(self, now_s: float) -> float:
        """The mean rate; of a window that is not a second old it says the bytes so far."""
        slot = int(now_s / _SLOT_S)
        first = self._forget(slot)
        since_s = max(self._began_s, first * _SLOT_S)
        return sum(num_bytes for _, num_bytes in self._slots) / max(1.0, now_s - since_s)

    def _forget(self, slot: int) -> int:
        """Drops what is older than the window; the first slot that is not."""
        first = slot - int(USE_WINDOW_S / _SLOT_S) + 1
        while self._slots and self._slots[0][0] < first:
            self._slots.popleft()
        return first


class Shaper:
    """One direction of a process's bulk traffic: measured, and held to a cap where there is one.

    All its streams share the cap, by turns of one take each. No lock is held while one waits.
    Thread-safe.

    Args:
        cap_mbit: Mbit/s (10^6 bits); None for no cap.
        clock: seconds that never fall.
    """

    def __init__(
        self, cap_mbit: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cap_mbit = cap_mbit
        self._clock = clock
        self._lock = threading.Lock()
        self._meter = Meter(clock())
        self._bucket = None if cap_mbit is None else Bucket.full(bytes_s(cap_mbit), clock())

    @property
    def use_mbit(self) -> float:
        """What passed in the last seconds, Mbit/s."""
        with self._lock:
            return self._meter.rate_bytes_s(self._clock()) / BYTES_PER_MBIT

    def wait(self, num_bytes: int, over: threading.Event) -> None:
        """Return when `num_bytes` may pass, or once `over` is set: nothing is to pass then."""
        if self._bucket is None:
            return
        with self._lock:
            self._bucket, wait_s = self._bucket.take(num_bytes, self._clock())
        if wait_s > 0:
            over.wait(wait_s)

    def count(self, num_bytes: int) -> None:
        """So many bytes have passed."""
        with self._lock:
            self._meter.count(num_bytes, self._clock())


class Intake:
    """Reading one transfer against a shaper: a chunk is paid for before it is read.

    What nobody reads, gRPC's flow control keeps its sender from sending, but for a window.

    Args:
        chunk_bytes: the largest chunk that is expected; a larger one is paid when it is there.
        over: ends every wait.
        holding: entered for as long as a wait lasts.
    """

    def __init__(
        self,
        shaper: Shaper,
        chunk_bytes: int,
        over: threading.Event,
        holding: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._shaper = shaper
        self._chunk_bytes = chunk_bytes
        self._over = over
        self._holding = holding
        self._paid_bytes = 0

    def before(self, left_bytes: int) -> None:
        """Wait until the next chunk of a transfer may be read; `left_bytes` are still to come."""
        self._pay(min(left_bytes, self._chunk_bytes))

    def after(self, num_bytes: int) -> None:
        """A message of this size was read."""
        self._shaper.count(num_bytes)
        self._pay(num_bytes)
        self._paid_bytes -= num_bytes

    def _pay(self, num_bytes: int) -> None:
        due_bytes = num_bytes - self._paid_bytes
        if due_bytes <= 0:
            return
        self._paid_bytes = num_bytes
        with self._holding():
            self._shaper.wait(due_bytes, self._over)


def bytes_s(cap_mbit: float) -> float:
    """A cap in bytes a second."""
    return cap_mbit * BYTES_PER_MBIT


def told_cap(cap_mbit: float) -> float | None:
    """A cap as the other end tells it: None for 0, and for what nobody could obey."""
    return cap_mbit if 0.0 < cap_mbit < math.inf else None


def chunk_bytes(largest: int, *caps_mbit: float | None) -> int:
    """The chunk of transfers that obey all `caps_mbit`: DEPTH_S of the smallest, or `largest`."""
    within = [int(bytes_s(cap) * DEPTH_S) for cap in caps_mbit if cap is not None]
    return max(1, min([largest, *within]))


def window_options(cap_mbit: float | None, streams: int) -> list[tuple[str, int]]:
    """gRPC options for one end that reads at most at `cap_mbit` on up to `streams` streams.

    gRPC lets a sender run ahead of its reader by a window, which it grows to megabytes on a fast
    link, and all of that would pass above the cap. Without a cap that is left alone.
    """
    if cap_mbit is None:
        return []
    window = int(bytes_s(cap_mbit) * WINDOW_S / streams)
    if streams > 1:
        window = max(STREAM_WINDOW_BYTES, window)
    window = min(WINDOW_LIMIT_BYTES, window)
    return [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window)]
