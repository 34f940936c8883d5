"""The one thread that owns a run's state.

Other threads hand it events and read the newest immutable state. Merging and
snapshots are done by one worker thread each; their results come back as events.

What waits in the queue is handled together and written to the journal together. Nothing of it is
heard of, by a reply, a note or a version, before it is as durable as it must be.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import structlog

from fragments.errors import BusyError, RunDirectoryError, StorageError
from fragments.payload import Payload
from fragments.records import Answered, ContributionKey, Goodbye, Lease, Phase, Receipt, Welcome
from outer_server.core import membership
from outer_server.core.events import (
    Attached,
    Contributed,
    Disconnect,
    Drain,
    Effect,
    Event,
    Merged,
    Note,
    Publish,
    Reply,
    Reported,
    RollBack,
    Send,
    StartMerge,
    Tick,
)
from outer_server.core.scheduler import Outcome, handle
from outer_server.core.state import MergeOrder, RunState
from outer_server.core.step import FragmentParameters
from outer_server.holdings import Sink
from outer_server.publications import Publications
from outer_server.recovery import Recovered
from outer_server.saver import Mark, Saver, SnapshotRule
from outer_server.store.snapshot import Saved, Snapshot
from outer_server.store.tape import Entry, Stored
from outer_server.store.unwritten import Unwritten

QUEUE_LENGTH = 4096
"""Events waiting for the engine; beyond this a caller gets BusyError."""

BATCH_LENGTH = 256
"""Events that are handled, and made durable, together at most."""

KEPT_LENGTH = 4096
"""Events kept while the disk takes none; the newest report of a learner stands for those before
it, so hardly more than a few for each learner come together."""

SYNC_EVERY_S = 1.0
"""What nobody was told of (reports, adoptions) is durable within this time."""

RETRY_S = 1.0
"""How often a journal that could not be written is tried again."""

CALL_TIMEOUT_S = 30.0
"""Longest wait for a reply; the engine answers in well under a millisecond unless stuck."""

STANDSTILL_S = 3.0
"""The engine comes by at least every PROGRESS_EVERY_S; a longer gap is no time of its own."""

FAILED = "the server has failed: see its log and start it again"

WAIT_S = 5.0
"""Longest wait of the merge thread for a snapshot to write the fragment that is to be replaced, and
for the engine to publish it: a disk that is slower than this costs memory rather than rounds."""

PROGRESS_EVERY_S = 1.0
"""How often clock and phase are told to everyone."""

_GRAVE = frozenset({"version_lost", "contribution_lost", "digest_mismatch"})
"""Notes of what ought not to happen."""

_log = structlog.get_logger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Detached:
    """A control stream ended; the scheduler need not know."""

    learner: str


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A snapshot is wanted now; the scheduler need not know."""


@dataclass(frozen=True, slots=True)
class _Item:
    """An event on its way in, and what belongs to it. `values`: those that a RollBack names."""

    event: Event | _Detached | _Wanted
    reply: Future[Reply] | None = None
    payload: Payload | None = None
    stored: Stored | None = None
    sink: Sink | None = None
    values: tuple[FragmentParameters, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Handled:
    """An item whose outcome is about to be heard of. `position`: of its event on the tape."""

    item: _Item
    outcome: Outcome
    position: int | None
    ends_run: bool


class _Made(NamedTuple):
    """An outcome. `is_told`: the scheduler was told of the event; so must the tape be then, and
    only then.
    """

    outcome: Outcome
    is_told: bool


class Engine:
    """Runs the scheduler. Thread-safe but for `start` and `stop`.

    Args:
        run: the run as it was found; its tensors are from now on the merge thread's own.
        save: writes a snapshot; called from a worker thread.
        snapshots: when a snapshot is due.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        run: Recovered,
        save: Callable[[Snapshot], Saved],
        snapshots: SnapshotRule,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = run.state
        self._parameters = run.parameters
        self._holdings = run.holdings
        self._journal = run.journal
        self._save = save
        self._saver = Saver(save, snapshots, run.newest)
        self._clock = clock
        self._began_s = clock()
        self._layout_digest = run.parameters.layout.digest
        self._queue: queue.Queue[_Item | None] = queue.Queue(QUEUE_LENGTH)
        self._merger = ThreadPoolExecutor(1, "merge")
        self._synced_at_s = 0.0
        self._is_synced = True
        self._is_stopping = False
        self._stalled_at_s = 0.0
        self._kept: list[_Item] = []
        self.stalled = ""
        self.failed = threading.Event()
        self._current: list[_Item] = []
        self._thread = threading.Thread(target=self._run, name="engine")

    @property
    def publications(self) -> Publications:
        """What may be pulled; any thread may read it."""
        return self._holdings.publications

    @property
    def state(self) -> RunState:
        """The newest state: an immutable snapshot."""
        return self._state

    def now_s(self) -> float:
        """Seconds that this engine has run; time for which the process stood still is left out."""
        return self._clock() - self._began_s

    def start(self) -> None:
        """Begin to handle events."""
        self._parameters.warm_up()
        self._began_s = self._clock()
        self._thread.start()

    def stop(self, reason: str) -> bool:
        """Open no more rounds, park the open ones, say goodbye, write a last snapshot. Whether that
        has it all.

        After a fault nothing is written: the last snapshot is the last good one. Where the disk
        does not take it nothing is lost if there is a journal; else, and where what is held is no
        snapshot to go on from, RunDirectoryError.
        """
        if self.failed.is_set():
            self._merger.shutdown(wait=True)
            self._saver.close()
            self._journal.close()
            return False
        # A disk that takes nothing, or an engine that is behind, does not keep it from ending.
        with contextlib.suppress(StorageError, BusyError, TimeoutError):
            self.call(Drain(reason))
        self._is_stopping = True
        self._merger.shutdown(wait=True)
        self._end()
        self._saver.close()
        self._saver.refuse(BusyError("the server is stopping: it writes a snapshot by itself"))
        self._holdings.send(None, Goodbye(None, reason))
        try:
            return not self.failed.is_set() and self._save_last()
        finally:
            self._journal.close()

    def _save_last(self) -> bool:
        position = self._journal.position
        try:
            self._save(self._snapshot(self._state, position))
        except RunDirectoryError as error:
            # Only what a disk refuses is over once there is room; all else is a fault to be told.
            if position is None or not isinstance(error.__cause__, OSError):
                raise
            _log.error("snapshot_failed", reason=str(error), kept="the journal has it all")
            return False
        return True

    def _end(self) -> None:
        """Let the engine's thread handle what waits, and end."""
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=1.0)
                self._thread.join()

    def call(
        self,
        event: Event,
        payload: Payload | None = None,
        stored: Stored | None = None,
        sink: Sink | None = None,
        values: tuple[FragmentParameters, ...] | None = None,
    ) -> Reply:
        """Hand in an event and wait for its reply. Raises BusyError, also when the engine died, and
        StorageError when it cannot be made durable: then it has not happened.
        """
        reply: Future[Reply] = Future()
        self._put(_Item(event, reply, payload, stored, sink, values))
        return reply.result(CALL_TIMEOUT_S)

    def snapshot(self, timeout_s: float) -> Reply:
        """Write one now; Answered once it is durable. Raises BusyError, StorageError where it
        cannot be written, and TimeoutError; it is written all the same then.
        """
        reply: Future[Reply] = Future()
        self._put(_Item(_Wanted(), reply))
        return reply.result(timeout_s)

    def between_snapshots(self, work: Callable[[], _Result]) -> _Result:
        """Have something done when no snapshot is written. Raises BusyError, and what it raises."""
        self.check()
        return self._saver.between(work)

    def tell(self, event: Event) -> None:
        """Hand in an event that has no reply. Raises BusyError."""
        self._put(_Item(event))

    def detach(self, lease: Lease, sink: Sink) -> None:
        """Forget a control stream that ended, unless a newer one has replaced it."""
        if not self.failed.is_set():
            self._put(_Item(_Detached(lease.learner), sink=sink))

    def check(self) -> None:
        """Raise BusyError once a fault has ended the engine."""
        if self.failed.is_set():
            raise BusyError(FAILED)

    def _put(self, item: _Item) -> None:
        self.check()
        try:
            self._queue.put(item, timeout=1.0)
        except queue.Full:
            raise BusyError("the server is overloaded: try again in a few seconds") from None

    def _run(self) -> None:
        try:
            self._loop()
        except Exception:  # noqa: BLE001  whatever it is, whoever serves this must hear of it
            self.failed.set()
            _log.exception("engine_failed")
            self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        """Tell those who wait for a reply that none will come."""
        self._saver.refuse(BusyError(FAILED))
        waiting: list[_Item | None] = [*self._current, *self._kept]
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.append(self._queue.get_nowait())
        for item in waiting:
            if item is not None and item.reply is not None and not item.reply.done():
                item.reply.set_exception(BusyError(FAILED))

    def _loop(self) -> None:
        wake_at_s = 0.0
        progress_at_s = self.now_s() + PROGRESS_EVERY_S
        before_s = self.now_s()
        is_over = False
        while not is_over:
            before_s = self._leave_out_standstill(before_s)
            timeout_s = max(0.0, min(wake_at_s, progress_at_s) - self.now_s())
            items, is_over = self._gather(timeout_s)
            self._current = items
            wake_at_s = self._handle_all(items or [_Item(Tick())])
            self._current = []
            if self.now_s() >= progress_at_s:
                progress_at_s = self.now_s() + PROGRESS_EVERY_S
                self._holdings.send(None, membership.progress(self._state))

    def _gather(self, timeout_s: float) -> tuple[list[_Item], bool]:
        """What waits, at most BATCH_LENGTH, and whether nothing more will come."""
        items: list[_Item] = []
        with contextlib.suppress(queue.Empty):
            item = self._queue.get(timeout=timeout_s)
            while item is not None:
                items.append(item)
                if len(items) == BATCH_LENGTH:
                    return items, False
                item = self._queue.get_nowait()
            return items, True
        return items, False

    def _leave_out_standstill(self, before_s: float) -> float:
        """Turn the clock back by what the process stood still (stopped, swapped out), or every
        lease would lapse before the reports that wait here are read. Returns the present.
        """
        stood_s = self.now_s() - before_s - STANDSTILL_S
        if stood_s > 0.0:
            _log.warning("stood_still", seconds=round(stood_s, 1))
            self._began_s += stood_s
        return self.now_s()

    def _handle_all(self, items: list[_Item]) -> float:
        """Handle events and let the world hear of them; when to come again."""
        items = [*self._kept, *items]
        now_s = self.now_s()
        try:
            handled = self._write(items, now_s)
        except StorageError as error:
            return self._stall(items, error)
        if self.stalled:
            _log.info("storage_works_again", events=len(self._kept))
        self._kept, self.stalled = [], ""
        wake_at_s = now_s + SYNC_EVERY_S
        for each in handled:
            self._state = each.outcome.state
            self._spread(each)
            wake_at_s = each.outcome.wake_at_s
        self._save_if_due()
        return wake_at_s if self._is_synced else min(wake_at_s, self._synced_at_s + SYNC_EVERY_S)

    def _write(self, items: list[_Item], now_s: float) -> list[_Handled]:
        """What follows from `items`, on the tape, and durably so where anybody is to hear of it.
        Raises StorageError; then nothing has happened.
        """
        state, handled, entries = self._state, list[_Handled](), list[Entry]()
        position, unix_s = self._journal.position, time.time()
        must_last = not self._is_synced and now_s - self._synced_at_s >= SYNC_EVERY_S
        is_late = must_last
        for item in items:
            before, (outcome, is_told) = state, self._outcome(state, item, now_s)
            state, event = outcome.state, item.event
            if isinstance(event, _Detached | _Wanted):
                pass
            elif is_told and _is_news(event, before, outcome):
                stored = item.stored if _is_accepted(outcome.reply) else None
                entries.append(Entry(now_s, unix_s, event, stored))
            must_last = must_last or _must_last(before, outcome)
            ends_run = state.phase is Phase.FINISHED and before.phase is not Phase.FINISHED
            at = None if position is None else position + len(entries)
            handled.append(_Handled(item, outcome, at, ends_run))
        covered = self._saver.take_covered()
        if entries or covered is not None or is_late:
            try:
                self._journal.write(entries, durable=must_last, trim=covered)
            except StorageError:
                self._saver.put_back(covered)
                raise
            if must_last or self._is_synced:
                self._synced_at_s = now_s
            self._is_synced = must_last
        return handled

    def _outcome(self, state: RunState, item: _Item, now_s: float) -> _Made:
        event = item.event
        if isinstance(event, _Detached | _Wanted):
            return _Made(Outcome(state, (), None, now_s), False)
        if isinstance(event, Attached):
            refusal = membership.check_lease(state, event.learner, event.token)
            if refusal is not None:
                return _Made(Outcome(state, (), refusal, now_s), False)
        outcome = handle(state, event, now_s, self._layout_digest)
        if isinstance(event, Contributed) and item.payload is None and _is_accepted(outcome.reply):
            # Refused before its bytes were stored, and acceptable now: it must come again.
            return _Made(Outcome(state, (), None, now_s), False)
        return _Made(outcome, True)

    def _spread(self, handled: _Handled) -> None:
        """Let those hear of it who are to."""
        item, outcome = handled.item, handled.outcome
        event = item.event
        if isinstance(event, _Detached):
            self._holdings.detach(event.learner, item.sink)
        if isinstance(event, Attached) and item.sink is not None and outcome.reply is None:
            self._holdings.attach(event.learner, item.sink)
        if isinstance(event, Contributed) and item.payload and _is_accepted(outcome.reply):
            self._holdings.payloads[event.meta.key] = item.payload
        if isinstance(event, RollBack) and item.values and isinstance(outcome.reply, Answered):
            self._holdings.go_back(outcome.state, item.values)
            self._merger.submit(self._holdings.begin_again, item.values)
        elif outcome.state.epoch != self._holdings.epoch:
            values = tuple(self._holdings.published)
            self._holdings.go_back(outcome.state, values, keeps=True)
            self._merger.submit(self._holdings.begin_again, values)
        for effect in self._make_final(handled) if handled.ends_run else outcome.effects:
            self._perform(effect)
        if isinstance(event, _Wanted) and item.reply is not None:
            self._saver.want(item.reply)
        elif item.reply is not None:
            item.reply.set_result(outcome.reply)

    def _stall(self, items: list[_Item], error: StorageError) -> float:
        """Nothing can be written: refuse what wants an answer, keep the rest for later, and let no
        time pass. When to come again.
        """
        if not self.stalled:
            _log.error("storage_failed", reason=str(error))
            self._stalled_at_s = self.now_s()
        self.stalled = str(error)
        reports: dict[str, _Item] = {}
        merged, rest = list[_Item](), list[_Item]()
        for item in items:
            if isinstance(item.event, Reported):
                reports[item.event.learner] = item
            elif isinstance(item.event, Merged):
                merged.append(item)
            elif item.reply is not None:
                item.reply.set_exception(error)
            elif not isinstance(item.event, Tick):
                rest.append(item)
        self._kept = [*reports.values(), *merged, *rest[-KEPT_LENGTH:]]
        self._began_s += max(0.0, self.now_s() - self._stalled_at_s)
        return self.now_s() + RETRY_S

    def _make_final(self, handled: _Handled) -> list[Effect]:
        """Nobody hears that the run is finished before its last state is in a snapshot: learners
        leave then, and nobody would be left to train again what a crash had lost.
        """
        spoken: list[Effect] = []
        for effect in handled.outcome.effects:
            if isinstance(effect, Send | Disconnect):
                spoken.append(effect)
            else:
                self._perform(effect)
        self._saver.finish(self._snapshot(handled.outcome.state, handled.position))
        return spoken

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartMerge() if self._is_stopping:
                pass  # Nobody would do it: what was to be merged waits for the next server.
            case StartMerge(order):
                payloads = self._holdings.payloads_of(order)
                self._merger.submit(self._merge, order, payloads, self._state.epoch)
            case Note(what, reason, fields):
                log = _log.warning if what in _GRAVE else _log.info
                log(what, reason=reason, **dict(fields))
            case _:
                self._holdings.perform(effect)

    def _merge(
        self, order: MergeOrder, payloads: dict[ContributionKey, Payload], epoch: int
    ) -> None:
        """On the merge thread: do the work and hand its result in."""
        self._saver.wait_written(order.fragment, WAIT_S)
        try:
            event = self._holdings.merge(order, payloads, epoch)
        except Exception:  # noqa: BLE001  a bug must not end the run, and must be seen
            _log.exception("merge_failed", fragment=order.fragment, version=order.version)
            event = self._holdings.stand(order, epoch, "internal error, see the log")
        published: Future[Reply] = Future()
        self._queue.put(_Item(event, published))
        # Until then the old values are held beside the new ones: one fragment's, not two.
        with contextlib.suppress(TimeoutError, BusyError):
            published.result(WAIT_S)

    def _save_if_due(self) -> None:
        position, now_s = self._journal.position, self.now_s()
        if self._saver.is_due(Mark.of(self._state, position), now_s):
            self._saver.begin(self._snapshot(self._state, position), now_s)

    def _snapshot(self, state: RunState, position: int | None) -> Snapshot:
        fragments = Unwritten(self._holdings.published)
        return Snapshot(state, fragments, dict(self._holdings.payloads), position)


def _is_news(event: Event, before: RunState, outcome: Outcome) -> bool:
    """Whether the tape must have it: time that passes mostly changes nothing."""
    return not isinstance(event, Tick) or bool(outcome.effects) or outcome.state != before


def _is_accepted(reply: Reply) -> bool:
    """Whether a contribution counts from now on."""
    return isinstance(reply, Receipt) and not reply.duplicate


def _must_last(before: RunState, outcome: Outcome) -> bool:
    """Whether somebody is to hear of something that must not be forgotten: that a contribution
    counts, that a lease was granted, a version, a new phase, what an operator has done.
    """
    if (
        isinstance(outcome.reply, Receipt | Welcome | Answered)
        or outcome.state.phase is not before.phase
        or outcome.state.epoch != before.epoch
    ):
        return True
    return any(isinstance(effect, Publish) for effect in outcome.effects)
