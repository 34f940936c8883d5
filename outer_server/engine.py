"""The one thread that owns a run's state.

Other threads hand it events and read the newest immutable state. Merging and
snapshots are done by one worker thread each; their results come back as events.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from fragments.errors import BusyError
from fragments.payload import Payload
from fragments.records import (
    ContributionKey,
    Goodbye,
    Lease,
    Phase,
    Receipt,
)
from outer_server.core import membership
from outer_server.core.events import (
    Attached,
    Contributed,
    Disconnect,
    Drain,
    Effect,
    Event,
    Note,
    Reply,
    Send,
    StartMerge,
    Tick,
)
from outer_server.core.scheduler import Outcome, handle
from outer_server.core.state import MergeOrder, RunState
from outer_server.holdings import Holdings, Sink
from outer_server.parameters import Parameters
from outer_server.publications import Publications
from outer_server.store.snapshot import Snapshot
from outer_server.store.unwritten import Unwritten

QUEUE_LENGTH = 4096
"""Events waiting for the engine; beyond this a caller gets BusyError."""

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

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotRule:
    """A snapshot is written after this many merged rounds, or after this long if any was."""

    every_rounds: int = 100
    every_s: float = 30.0


@dataclass(frozen=True, slots=True)
class _Detached:
    """A control stream ended; the scheduler need not know."""

    learner: str


@dataclass(frozen=True, slots=True)
class _Item:
    """An event on its way in, and what belongs to it."""

    event: Event | _Detached
    reply: Future[Reply] | None = None
    payload: Payload | None = None
    sink: Sink | None = None


class Engine:
    """Runs the scheduler. Thread-safe but for `start` and `stop`.

    Args:
        parameters: the run's tensors; from now on the merge thread's own.
        state: where to go on from, as `core.resume` made it.
        payloads: contributions that have arrived and are not merged yet.
        save: writes a snapshot; called from a worker thread.
        snapshots: when a snapshot is due.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        parameters: Parameters,
        state: RunState,
        payloads: Mapping[ContributionKey, Payload],
        save: Callable[[Snapshot], None],
        snapshots: SnapshotRule,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._parameters = parameters
        self._holdings = Holdings(parameters, state, payloads)
        self._save = save
        self._snapshots = snapshots
        self._saved_rounds, self._saved_at_s = state.rounds_merged, 0.0
        self._clock = clock
        self._began_s = clock()
        self._layout_digest = parameters.layout.digest
        self._queue: queue.Queue[_Item | None] = queue.Queue(QUEUE_LENGTH)
        self._merger = ThreadPoolExecutor(1, "merge")
        self._saver = ThreadPoolExecutor(1, "snapshot")
        self._saving: Future[None] | None = None
        self._unwritten = Unwritten(())
        self.failed = threading.Event()
        self._current: _Item | None = None
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

    def stop(self, reason: str) -> None:
        """Open no more rounds, park the open ones, say goodbye, write a last snapshot.

        After a fault nothing is written: the last snapshot is the last good one.
        """
        if self.failed.is_set():
            self._merger.shutdown(wait=True)
            self._saver.shutdown(wait=True)
            return
        self.call(Drain(reason))
        self._merger.shutdown(wait=True)
        self._queue.put(None, timeout=CALL_TIMEOUT_S)
        self._thread.join()
        self._saver.shutdown(wait=True)
        self._holdings.send(None, Goodbye(None, reason))
        self._save(self._snapshot(self._state))

    def call(self, event: Event, payload: Payload | None = None, sink: Sink | None = None) -> Reply:
        """Hand in an event and wait for its reply. Raises BusyError, also when the engine died."""
        reply: Future[Reply] = Future()
        self._put(_Item(event, reply, payload, sink))
        return reply.result(CALL_TIMEOUT_S)

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
        waiting = [self._current]
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
        while True:
            before_s = self._leave_out_standstill(before_s)
            timeout_s = max(0.0, min(wake_at_s, progress_at_s) - self.now_s())
            try:
                item = self._queue.get(timeout=timeout_s)
            except queue.Empty:
                item = _Item(Tick())
            if item is None:
                return
            self._current = item
            wake_at_s = self._handle(item)
            if self.now_s() >= progress_at_s:
                progress_at_s = self.now_s() + PROGRESS_EVERY_S
                self._holdings.send(None, membership.progress(self._state))

    def _leave_out_standstill(self, before_s: float) -> float:
        """Turn the clock back by what the process stood still (stopped, swapped out), or every
        lease would lapse before the reports that wait here are read. Returns the present.
        """
        stood_s = self.now_s() - before_s - STANDSTILL_S
        if stood_s > 0.0:
            _log.warning("stood_still", seconds=round(stood_s, 1))
            self._began_s += stood_s
        return self.now_s()

    def _handle(self, item: _Item) -> float:
        event = item.event
        if isinstance(event, _Detached):
            self._holdings.detach(event.learner, item.sink)
            return self.now_s()
        if isinstance(event, Attached) and item.sink is not None:
            refusal = membership.check_lease(self._state, event.learner, event.token)
            if refusal is None:
                self._holdings.attach(event.learner, item.sink)
            elif item.reply is not None:
                item.reply.set_result(refusal)
                return self.now_s()
        outcome = handle(self._state, event, self.now_s(), self._layout_digest)
        is_new = isinstance(outcome.reply, Receipt) and not outcome.reply.duplicate
        if isinstance(event, Contributed) and is_new and item.payload is not None:
            self._holdings.payloads[event.meta.key] = item.payload
        effects = self._make_final(outcome) if self._ends_run(outcome) else outcome.effects
        self._state = outcome.state
        for effect in effects:
            self._perform(effect)
        if item.reply is not None:
            item.reply.set_result(outcome.reply)
        self._save_if_due()
        return outcome.wake_at_s

    def _ends_run(self, outcome: Outcome) -> bool:
        is_over = outcome.state.phase is Phase.FINISHED
        return is_over and self._state.phase is not Phase.FINISHED

    def _make_final(self, outcome: Outcome) -> list[Effect]:
        """Nobody hears that the run is finished before its last state is on disk: learners leave
        then, and nobody would be left to train again what a crash had lost.
        """
        spoken: list[Effect] = []
        for effect in outcome.effects:
            if isinstance(effect, Send | Disconnect):
                spoken.append(effect)
            else:
                self._perform(effect)
        # By the one thread that writes, so that it does not meet a snapshot under way.
        self._saver.submit(self._save_logged, self._snapshot(outcome.state)).result()
        return spoken

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartMerge(order):
                payloads = self._holdings.payloads_of(order)
                self._merger.submit(self._merge, order, payloads, self._state.epoch)
            case Note(what, reason, fields):
                _log.info(what, reason=reason, **dict(fields))
            case _:
                self._holdings.perform(effect)

    def _merge(
        self, order: MergeOrder, payloads: dict[ContributionKey, Payload], epoch: int
    ) -> None:
        """On the merge thread: do the work and hand its result in."""
        self._unwritten.wait_written(order.fragment, WAIT_S)
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
        rounds, now_s = self._state.rounds_merged - self._saved_rounds, self.now_s()
        is_old = now_s - self._saved_at_s >= self._snapshots.every_s
        if rounds < (1 if is_old else self._snapshots.every_rounds):
            return
        if self._saving is not None and not self._saving.done():
            return
        self._saved_at_s = now_s
        snapshot = self._snapshot(self._state)
        self._unwritten = snapshot.fragments
        self._saving = self._saver.submit(self._save_logged, snapshot)

    def _save_logged(self, snapshot: Snapshot) -> None:
        try:
            self._save(snapshot)
        except Exception as error:  # noqa: BLE001  left in a future it would be lost
            _log.error("snapshot_failed", reason=str(error))
        else:
            self._saved_rounds = snapshot.state.rounds_merged

    def _snapshot(self, state: RunState) -> Snapshot:
        fragments = Unwritten(self._holdings.published)
        return Snapshot(state, fragments, dict(self._holdings.payloads))
