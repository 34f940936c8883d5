"""The outer server as services, the simulation and tests see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from fragments.disk import REAL_DISK, Disk
from fragments.errors import BusyError, PayloadError, RefusedError
from fragments.records import (
    PROTOCOL_VERSION,
    Adopted,
    Contribution,
    ContributionKey,
    Decline,
    Evaluation,
    Hello,
    Lease,
    Phase,
    Receipt,
    Refusal,
    RefusalCode,
    Report,
    RunDescription,
    RunStatus,
    Update,
    Version,
    Welcome,
)
from outer_server import status
from outer_server.administration import Administration
from outer_server.core import membership, receive
from outer_server.core.events import (
    Attached,
    Contributed,
    Declined,
    Evaluated,
    HasAdopted,
    Join,
    Leave,
    Reply,
    Reported,
)
from outer_server.core.state import ContributionMeta, RunState
from outer_server.engine import Engine
from outer_server.holdings import Sink
from outer_server.pace import Pace
from outer_server.recovery import recover, stopped
from outer_server.saver import SnapshotRule
from outer_server.store.rundir import RunDirectory
from outer_server.store.snapshot import KEPT


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes on the bulk connections of one name."""

    up: int = 0
    down: int = 0


class OuterServer:
    """One run, served. Thread-safe; use as a context manager.

    Calls that take a lease raise RefusedError when it may not speak. Raises
    RunDirectoryError when the directory cannot be used. `admin`: what an operator may do.

    Args:
        path: what `store.rundir.create_run` made.
        snapshots: when they are written.
        clock: seconds, monotonic.
        keep_journal: without one, an unclean stop goes back to the newest snapshot.
        take_over: go on with a copy of a run directory, in a new epoch.
        disk: how the run directory is written.
        keep_snapshots: so many of the newest; the tape and its payloads reach back to the oldest.
    """

    def __init__(
        self,
        path: Path,
        snapshots: SnapshotRule = SnapshotRule(),  # noqa: B008  frozen
        clock: Callable[[], float] = time.monotonic,
        *,
        keep_journal: bool = True,
        take_over: bool = False,
        disk: Disk = REAL_DISK,
        keep_snapshots: int = KEPT,
    ) -> None:
        self._directory = RunDirectory(path, disk, keep_snapshots)
        self._keep_journal = keep_journal
        self._take_over = take_over
        self._snapshots = snapshots
        self._clock = clock
        self._traffic: dict[str, Traffic] = {}
        self._traffic_lock = threading.Lock()
        self._pace = Pace()

    def __enter__(self) -> OuterServer:
        self._directory.__enter__()
        try:
            run = recover(
                self._directory, keep_journal=self._keep_journal, take_over=self._take_over
            )
            self._parameters, self._journal = run.parameters, run.journal
            self._generation = run.state.generation
            self._engine = Engine(run, self._directory.save, self._snapshots, self._clock)
            self.admin = Administration(self._engine, self._directory, self._parameters)
            self._engine.start()
        except BaseException:
            self._directory.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._engine.stop(self.admin.stop_reason or "the server is stopping"):
                stopped(self._directory, self._engine.state.epoch, has_journal=self._keep_journal)
        finally:
            self._directory.__exit__(kind, error, traceback)

    @property
    def state(self) -> RunState:
        """The newest state: an immutable snapshot."""
        return self._engine.state

    @property
    def generation(self) -> int:
        """Raised durably at each start."""
        return self._generation

    def describe(self) -> RunDescription:
        """What is trained here; where bulk is served is for `services` to fill in."""
        layout, state = self._directory.layout, self._engine.state
        return RunDescription(
            run_id=state.spec.run_id,
            protocol_version=PROTOCOL_VERSION,
            run_spec_json=state.spec.model_dump_json(),
            layout_json=layout.to_json(),
            layout_digest=layout.digest,
            bulk_port=0,
            bulk_host="",
            generation=state.generation,
            epoch=state.epoch,
            phase=state.phase,
        )

    def join(self, hello: Hello) -> Welcome:
        """Grant a lease. Raises RefusedError."""
        answer = _granted(self._engine.call(Join(hello)))
        if not isinstance(answer, Welcome):
            raise TypeError(f"a join is answered with Welcome, not {answer!r}")
        return answer

    def attach(self, lease: Lease, sink: Sink) -> None:
        """Send this lease's notes to `sink` from now on; open asks come again.

        `sink` is called from the engine's thread and must not block. The sink
        that was attached before gets Goodbye.
        """
        _granted(self._engine.call(Attached(lease.learner, lease.token), sink=sink))

    def detach(self, lease: Lease, sink: Sink) -> None:
        """Forget `sink`, if it is still the one attached."""
        self._engine.detach(lease, sink)

    def report(self, lease: Lease, report: Report) -> None:
        """A learner's newest position."""
        self._check(lease)
        self._engine.tell(Reported(lease.learner, lease.token, report))

    def decline(self, lease: Lease, decline: Decline) -> None:
        """An ask answered with nothing."""
        self._check(lease)
        self._engine.tell(Declined(lease.learner, lease.token, decline))

    def adopted(self, lease: Lease, adopted: Adopted) -> None:
        """A version that a learner trains on."""
        self._check(lease)
        self._engine.tell(HasAdopted(lease.learner, lease.token, adopted))

    def evaluated(self, lease: Lease, evaluation: Evaluation) -> None:
        """A held-out loss of global weights."""
        self._check(lease)
        self._engine.tell(Evaluated(lease.learner, lease.token, evaluation))

    def leave(self, lease: Lease, reason: str) -> None:
        """Give a lease back; a stale lease is no error."""
        self._engine.call(Leave(lease.learner, lease.token, reason))

    def admit(self, lease: Lease, key: ContributionKey) -> None:
        """Refuse early, before bytes are received, what `contribute` would refuse."""
        self._check(lease)
        meta = ContributionMeta(key, steps=1, tokens=1, cursor_from=0, cursor_to=0)
        event = Contributed(lease.learner, lease.token, meta, key.base_version, "")
        answer = receive.admissible(self._engine.state, event)
        # CONSUMED may turn out to be a repetition of what was accepted: let it come.
        if isinstance(answer, Refusal) and answer.code is not RefusalCode.CONSUMED:
            raise RefusedError(answer.code, answer.reason)

    def contribute(self, lease: Lease, contribution: Contribution) -> Receipt:
        """Take a whole contribution; answered once it counts. Raises RefusedError."""
        key, payload = contribution.key, contribution.payload
        self._check(lease)
        layout = self._directory.layout
        if not 0 <= key.fragment < len(layout.fragments):
            raise RefusedError(RefusalCode.MISMATCH, f"there is no fragment {key.fragment}")
        try:
            self._parameters.check(key.fragment, payload)
        except PayloadError as error:
            raise RefusedError(RefusalCode.BAD_PAYLOAD, str(error)) from error
        event = Contributed(
            lease.learner,
            lease.token,
            ContributionMeta(
                key,
                contribution.steps,
                contribution.tokens,
                contribution.cursor_from,
                contribution.cursor_to,
            ),
            contribution.asked_version,
            status.payload_digest(payload),
            contribution.base_digest,
        )
        if receive.admissible(self._engine.state, event) is not None:
            # A repetition, or refused: nothing to be kept of it, but it is counted.
            return _receipt(self._engine.call(event))
        with self._journal.kept(payload) as stored:
            return _receipt(self._engine.call(event, payload, stored))

    def updates(self, lease: Lease, fragment: int, have: Version | None) -> tuple[Update, ...]:
        """What leads from `have` to the newest version; immutable, shared by all readers."""
        self._check(lease)
        if not 0 <= fragment < len(self._directory.layout.fragments):
            raise RefusedError(RefusalCode.MISMATCH, f"there is no fragment {fragment}")
        return self._engine.publications.updates(fragment, have)

    @property
    def codec(self) -> str:
        """Id of the codec in which contributions travel."""
        return self._parameters.codec.id

    def payload_limit(self, fragment: int) -> int:
        """Largest compressed size, in bytes, that a contribution to `fragment` may have."""
        return self._parameters.codec.max_wire_bytes(self._directory.layout.fragments[fragment])

    def count_bytes(self, learner: str, up: int, down: int) -> None:
        """Add to a name's traffic; names that never joined are not counted."""
        if learner not in self._engine.state.learners:
            return
        with self._traffic_lock:
            old = self._traffic.get(learner, Traffic())
            self._traffic[learner] = Traffic(old.up + up, old.down + down)

    @property
    def failed(self) -> bool:
        """Whether a fault has ended the engine: nothing is served any more but this answer."""
        return self._engine.failed.is_set()

    def status(self) -> RunStatus:
        """A snapshot of the run; waits for nothing. BusyError once the engine has failed."""
        self._engine.check()
        now_s, state = self._engine.now_s(), self._engine.state
        with self._traffic_lock:
            traffic = {name: (t.up, t.down) for name, t in self._traffic.items()}
            tokens_per_s = self._pace.look(state, now_s)
        found = status.run_status(state, self._directory.layout, traffic, now_s, tokens_per_s)
        is_open = state.phase in (Phase.WAITING, Phase.TRAINING)
        trouble = self._journal.trouble if is_open else ""
        return replace(found, stalled=self._engine.stalled or trouble)

    def _check(self, lease: Lease) -> None:
        refusal = membership.check_lease(self._engine.state, lease.learner, lease.token)
        if refusal is not None:
            raise RefusedError(refusal.code, refusal.reason)


def _receipt(reply: Reply) -> Receipt:
    answer = _granted(reply)
    if not isinstance(answer, Receipt):
        raise BusyError("the server's state has just changed: send it again")
    return answer


def _granted(reply: Reply) -> Reply:
    if isinstance(reply, Refusal):
        raise RefusedError(reply.code, reply.reason)
    return reply
