"""How long a call may take, and how often it is tried."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeVar

import tenacity

from fragments.errors import BusyError, PayloadError, UnreachableError
from services.errors import OlderServerError
from services.settings import BULK_DEADLINE_LIMIT_S, ClientSettings
from services.shaper import bytes_s

_Result = TypeVar("_Result")


class TransferPace:
    """Measured throughput of one direction, and the deadline that follows from it. Thread-safe.

    `cap_mbit`: what this end allows itself, however fast the link was measured; None for no cap.
    """

    def __init__(self, settings: ClientSettings, cap_mbit: float | None = None) -> None:
        self._settings = settings
        self._rate_bytes_s = settings.first_rate_bytes_s
        self._cap_bytes_s = math.inf if cap_mbit is None else bytes_s(cap_mbit)
        self._lock = threading.Lock()

    @property
    def rate_bytes_s(self) -> float:
        """Smoothed bytes a second."""
        return self._rate_bytes_s

    def deadline_s(self, transfer_bytes: int, share_bytes_s: float = math.inf) -> float:
        """What a transfer of this size is given, seconds.

        `share_bytes_s`: the least that the other end's cap leaves for one transfer.
        """
        expected_s = transfer_bytes / min(self._rate_bytes_s, self._cap_bytes_s)
        patience_s = self._settings.deadline_factor * expected_s
        deadline_s = self._settings.call_s + max(patience_s, transfer_bytes / share_bytes_s)
        return min(deadline_s, BULK_DEADLINE_LIMIT_S - 60.0)  # the server refuses longer ones

    def observe(self, moved_bytes: int, took_s: float) -> None:
        """Take in a transfer, whole or broken off; few bytes say nothing about throughput."""
        if moved_bytes < self._settings.chunk_bytes or took_s <= 0:
            return
        with self._lock:
            self._rate_bytes_s += 0.5 * (moved_bytes / took_s - self._rate_bytes_s)


class Attempts:
    """What one retried call knows of its tries."""

    def __init__(self) -> None:
        self.number = 0
        self._fruitless = 0
        self._furthest_bytes = 0

    @property
    def first(self) -> bool:
        """Whether this is the first try."""
        return self.number == 1

    def begin(self) -> None:
        """A try begins."""
        self.number += 1
        self._fruitless += 1

    def reached(self, done_bytes: int) -> None:
        """So many bytes need not be sent again: if never more did, the tries count anew.

        Bytes that were thrown away as damaged and sent again are no progress.
        """
        if done_bytes > self._furthest_bytes:
            self._furthest_bytes = done_bytes
            self._fruitless = 1

    @property
    def fruitless(self) -> int:
        """Tries since the last progress, this one included."""
        return self._fruitless


def retried(
    call: Callable[[Attempts], _Result], settings: ClientSettings, closed: threading.Event
) -> _Result:
    """Calls until it succeeds; raises the last error.

    Tried again: a server that is unreachable or busy, and a payload damaged on its way; at most
    `settings.tries` times without progress, with jittered waits, and not once `closed` is set.
    A transfer is finite and progress is whole chunks, so the tries are bounded in any case.
    """
    attempts = Attempts()

    def attempt() -> _Result:
        attempts.begin()
        return call(attempts)

    def enough(_: tenacity.RetryCallState) -> bool:
        return closed.is_set() or attempts.fruitless >= settings.tries

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_passing),
        stop=enough,
        wait=tenacity.wait_random_exponential(settings.retry_wait_s, settings.retry_wait_max_s),
        sleep=tenacity.sleep_using_event(closed),
        reraise=True,
    )(attempt)


def _is_passing(error: BaseException) -> bool:
    passing = isinstance(error, UnreachableError | BusyError | PayloadError)
    return passing and not isinstance(error, OlderServerError)
