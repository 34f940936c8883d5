"""Follows the status of a run from a thread of its own, through breaks of the connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from fragments.errors import DilocoError
from fragments.records import RunStatus
from services.client.status import watch_status

Watch = Callable[[str, float], Iterator[RunStatus]]
"""(address, seconds between two snapshots) -> snapshots, until the connection ends."""

_RETRY_S = 0.5


class StatusWatcher:
    """Holds the newest snapshot of the run at `address`. A context manager.

    A connection that cannot be made or breaks is tried again every half second for as long as the
    watcher lives; `trouble` says what was wrong last, empty while all is well.
    """

    def __init__(self, address: str, interval_s: float, watch: Watch = watch_status) -> None:
        self.trouble = ""
        self._address = address
        self._interval_s = interval_s
        self._watch = watch
        self._lock = threading.Lock()
        self._fresh: RunStatus | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="status-watch")

    def __enter__(self) -> StatusWatcher:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        # The thread may sit in a call for another interval; it is a daemon and touches nothing.
        self._stop.set()
        self._thread.join(timeout=min(1.0, 2 * self._interval_s))

    def take(self) -> RunStatus | None:
        """The newest snapshot, or None if it was taken already or there is none yet."""
        with self._lock:
            fresh, self._fresh = self._fresh, None
        return fresh

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                for status in self._watch(self._address, self._interval_s):
                    self.trouble = ""
                    with self._lock:
                        self._fresh = status
                    if self._stop.is_set():
                        return
            except DilocoError as error:
                self.trouble = str(error)
            self._stop.wait(_RETRY_S)
