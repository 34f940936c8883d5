"""When a snapshot is written, and the one thread that writes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import structlog

from fragments.errors import BusyError, StorageError
from fragments.records import Answered
from outer_server.core.events import Reply
from outer_server.core.state import RunState
from outer_server.store.snapshot import Saved, Snapshot
from outer_server.store.unwritten import Unwritten

_log = structlog.get_logger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class SnapshotRule:
    """A snapshot is written after this many merged rounds, or after this long if any was, or after
    this many events of the tape, which a restart would have to go through again. `share`: of the
    time, at most, that those take which come by the clock; a large model's come more seldom, though
    never further apart than `longest_s`: one that a stopped process took hours for tells nothing.
    """

    every_rounds: int = 100
    every_s: float = 30.0
    every_events: int = 50_000
    share: float = 0.05
    longest_s: float = 600.0

    def pause_s(self, took_s: float) -> float:
        """How long after one was begun the next is due by the clock, if the last took `took_s`."""
        return max(self.every_s, min(took_s / self.share, self.longest_s))


class Mark(NamedTuple):
    """How far a snapshot reaches."""

    epoch: int
    rounds: int
    position: int

    @staticmethod
    def of(state: RunState, position: int | None) -> Mark:
        """That of a snapshot of `state`, taken at `position` of the tape."""
        return Mark(state.epoch, state.rounds_merged, position or 0)


class Saver:
    """Writes snapshots. One thread at a time may call it, unless a method says otherwise.

    Args:
        save: writes one; called from a thread of its own.
        rule: when one is due.
        newest: how far the newest reaches.
    """

    def __init__(self, save: Callable[[Snapshot], Saved], rule: SnapshotRule, newest: Mark) -> None:
        self._save = save
        self._rule = rule
        self._newest = newest
        self._began_s = 0.0
        self._took_s = 0.0
        self._has_failed = False
        self._wanted: list[Future[Reply]] = []
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._saving: Future[None] | None = None
        self._unwritten = Unwritten(())
        self._covered: int | None = None

    def want(self, reply: Future[Reply]) -> None:
        """Somebody waits for a snapshot; answered once one is durable."""
        self._wanted.append(reply)

    def is_due(self, reached: Mark, now_s: float) -> bool:
        """Whether one is to begin now: wanted or due, and none under way."""
        pause_s = self._rule.pause_s(0.0 if self._has_failed else self._took_s)
        is_old = now_s - self._began_s >= pause_s
        newest = self._newest
        is_due = (
            reached.rounds - newest.rounds >= (1 if is_old else self._rule.every_rounds)
            or reached.position - newest.position >= self._rule.every_events
            # Soon after a rollback nobody shall need the older ones any more.
            or reached.epoch != newest.epoch
        )
        # A full disk is not tried again at every turn.
        is_due = is_due and (is_old or not self._has_failed)
        is_free = self._saving is None or self._saving.done()
        return is_free and (is_due or bool(self._wanted))

    def begin(self, snapshot: Snapshot, now_s: float) -> None:
        """Have one written meanwhile."""
        self._began_s = now_s
        wanted, self._wanted = self._wanted, []
        self._unwritten = snapshot.fragments
        self._saving = self._thread.submit(self._write, snapshot, wanted)

    def finish(self, snapshot: Snapshot) -> None:
        """Write one and wait for it; what fails is logged."""
        # By the one thread that writes, so that it does not meet one under way.
        self._thread.submit(self._write, snapshot, ()).result()

    def take_covered(self) -> int | None:
        """Up to which event the tape is needed no more, where that is news."""
        covered, self._covered = self._covered, None
        return covered

    def put_back(self, covered: int | None) -> None:
        """What `take_covered` said could not be acted upon."""
        if self._covered is None:
            self._covered = covered

    def wait_written(self, fragment: int, timeout_s: float) -> None:
        """Have the one under way write a fragment next, and wait for that. For any thread."""
        self._unwritten.wait_written(fragment, timeout_s)

    def between(self, work: Callable[[], _Result]) -> _Result:
        """Have something done while none is written. For any thread. Raises BusyError, and what it
        raises.
        """
        try:
            done = self._thread.submit(work)
        except RuntimeError:
            raise BusyError("the server is stopping: try again when it is back") from None
        return done.result()

    def refuse(self, error: BusyError) -> None:
        """Tell those who wait for one that none will come."""
        wanted, self._wanted = self._wanted, []
        _refuse(wanted, error)

    def close(self) -> None:
        """Wait for the one under way; write no more."""
        self._thread.shutdown(wait=True)

    def _write(self, snapshot: Snapshot, wanted: Sequence[Future[Reply]]) -> None:
        reached, began_s = Mark.of(snapshot.state, snapshot.position), time.monotonic()
        try:
            saved = self._save(snapshot)
            self._has_failed = False
        except Exception as error:  # noqa: BLE001  left in a future it would be lost
            self._has_failed = True
            _log.error("snapshot_failed", reason=str(error))
            _refuse(wanted, StorageError("no snapshot could be written: see the server's log"))
            return
        self._newest, self._took_s = reached, time.monotonic() - began_s
        if saved.covered is not None:
            self._covered = saved.covered
        for reply in wanted:
            reply.set_result(Answered(f"snapshot {saved.name} is written", snapshot=saved.name))


def _refuse(waiting: Sequence[Future[Reply]], error: BusyError) -> None:
    for reply in waiting:
        reply.set_exception(error)
