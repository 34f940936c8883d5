"""Fetches published versions: one thread that pulls, decodes and prepares."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import structlog

from fragments.errors import DilocoError, PayloadError, RefusedError, UnreachableError
from fragments.records import Published, Version
from learner.backlog import Backlog
from learner.island import Island
from learner.ports import Link
from learner.session import Session

PAUSE_S = 0.5
"""After a pull that failed, before the next."""

STOP_S = 0.5
"""Longest wait at the end for a pull under way."""

_log = structlog.get_logger(__name__)


class Inbox:
    """Holds the newest wanted version of each fragment; older wishes are dropped."""

    def __init__(self, island: Island, link: Link, session: Session) -> None:
        self._island = island
        self._link = link
        self._session = session
        self._wanted: dict[int, Version] = {}
        self._changed = threading.Condition()
        self.backlog = Backlog(lambda: island.completed.step)
        self._stopping = False
        self._useless_bytes = 0
        self._is_cut_off = False
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def start(self) -> None:
        """Begin to pull."""
        self._thread.start()

    def stop(self) -> None:
        """Pull no more; a pull that is under way is hardly waited for."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def want(self, published: Published) -> None:
        """Queue a version, unless a newer one is wanted or held already; never blocks."""
        with self._changed:
            wanted = self._wanted.get(published.fragment)
            if wanted is None or wanted < published.version:
                self._wanted[published.fragment] = published.version
                self._changed.notify_all()

    def want_only(self, newest: Sequence[Version]) -> None:
        """Queue one version of each fragment instead of whatever was wanted; never blocks."""
        with self._changed:
            self._wanted = dict(enumerate(newest))
            self._changed.notify_all()

    @property
    def arrived_bytes(self) -> int:
        """Payload bytes so far, those of a pull under way included: whoever waits sees whether
        anything moves. Falls back when they turn out to be of no use.
        """
        return self._link.arrived_bytes - self._useless_bytes

    @property
    def wanted(self) -> dict[int, Version]:
        """The newest versions heard of, by fragment, that are not all prepared."""
        with self._changed:
            return dict(self._wanted)

    def wait_prepared(self, versions: Mapping[int, Version], timeout_s: float) -> bool:
        """Wait until those versions, or newer ones, are prepared; False if that took too long."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while self._wanted and not all(self._is_prepared(*each) for each in versions.items()):
                left_s = until_s - time.monotonic()
                if left_s <= 0 or self._stopping:
                    return False
                self._changed.wait(min(left_s, 0.5))
                if self._session.failure is not None:
                    return False
            return True

    def _run(self) -> None:
        try:
            while (fragment := self._next()) is not None:
                before_bytes = self._link.arrived_bytes
                if not self._fetch(fragment):
                    self.backlog.idle()
                    self._useless_bytes += self._link.arrived_bytes - before_bytes
                    with self._changed:
                        self._changed.wait_for(lambda: self._stopping, PAUSE_S)
        except Exception as error:  # noqa: BLE001  a dead inbox would leave training alone
            _log.exception("inbox_failed")
            self._session.fail(DilocoError(f"internal error in the inbox: {error}"))

    def _next(self) -> int | None:
        with self._changed:
            while not self._stopping:
                for fragment, version in self._wanted.items():
                    if not self._is_prepared(fragment, version):
                        self.backlog.busy()
                        # In turn: where versions come faster than they can be pulled, one fragment
                        # would be wanted again and again, and the others never be its like.
                        self._wanted[fragment] = self._wanted.pop(fragment)
                        return fragment
                self.backlog.idle()
                if self._wanted:
                    self._wanted.clear()
                    self._changed.notify_all()
                self._changed.wait()
            return None

    def _is_prepared(self, fragment: int, version: Version) -> bool:
        newest = self._island.newest_version(fragment)
        return newest is not None and newest >= version

    def _fetch(self, fragment: int) -> bool:
        have = self._island.newest_version(fragment)
        try:
            for update in self._link.pull(self._session.lease, fragment, have):
                self._island.prepare(update)
        except PayloadError as error:
            _log.warning("pull_damaged", fragment=fragment, reason=str(error))
            self._island.forget(fragment)
            return False
        except RefusedError as error:
            _log.warning("pull_refused", fragment=fragment, code=error.code, reason=str(error))
            return False
        except DilocoError as error:
            # While the server is away each try says the same: once is enough.
            log = _log.debug if self._is_cut_off else _log.warning
            log("pull_failed", fragment=fragment, reason=str(error))
            self._is_cut_off = isinstance(error, UnreachableError)
            return False
        self._is_cut_off = False
        return True
