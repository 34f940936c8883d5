"""The lease and the control stream of one process, kept alive by a thread of its own.

A server that is away stops nobody: the session tries again, with growing
jittered pauses, for as long as the process lives, while training goes on.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from fragments.errors import DilocoError, RefusedError, UnreachableError
from fragments.records import (
    Adopted,
    Decline,
    Evaluation,
    Goodbye,
    Hello,
    Lease,
    Phase,
    Progress,
    RefusalCode,
    Report,
    ServerNote,
    Welcome,
)
from learner.ports import ControlLine, Link

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
"""Between two tries to reach the server: doubled each time, then halved at random."""

FINAL = frozenset({RefusalCode.FENCED, RefusalCode.MISMATCH, RefusalCode.FULL})
"""Refusals after which trying again would be wrong."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Speaking:
    """An open stream, and the learner's own counters at which its lease began.

    One value, so that a report can never reach one lease's stream in another
    lease's counters.
    """

    line: ControlLine
    step: int
    tokens: int


class Session:
    """Joins, keeps the control stream open, and joins again where the lease was lost.

    Args:
        link: the outer server.
        hello: makes the request to join from the process's present state.
        on_welcome: called with every grant, before its stream opens; returns the
            learner's own steps and tokens at that moment, from which the lease counts.
        on_attached: called whenever a stream has been opened: what was said on the
            stream before may be lost, so cumulative state is to be said again.
        on_note: asks, publications and goodbyes, from the link's thread; must not block.
    """

    def __init__(
        self,
        link: Link,
        hello: Callable[[], Hello],
        on_welcome: Callable[[Welcome], tuple[int, int]],
        on_attached: Callable[[], None],
        on_note: Callable[[ServerNote], None],
    ) -> None:
        self._link = link
        self._hello = hello
        self._on_welcome = on_welcome
        self._on_attached = on_attached
        self._on_note = on_note
        self._speaking: _Speaking | None = None
        self._lease: Lease | None = None
        self._began = (0, 0)
        self._last_report = Report(step=0, tokens=0, cursor=0)
        self._goodbye: Goodbye | None = None
        self._heartbeat_s = 1.0
        self._broken = threading.Event()
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._progress = Progress(0, 0, Phase.WAITING)
        self._failure: DilocoError | None = None
        self._thread = threading.Thread(target=self._keep, name="session", daemon=True)

    def start(self) -> Welcome:
        """Join and open the stream. Raises RefusedError or UnreachableError."""
        welcome = self._join()
        self._open()
        self._thread.start()
        return welcome

    @property
    def lease(self) -> Lease:
        """The lease now held. Raises RuntimeError before `start`."""
        if self._lease is None:
            raise RuntimeError("the session has not joined yet")
        return self._lease

    @property
    def progress(self) -> Progress:
        """The run's clock and phase as last heard."""
        return self._progress

    @property
    def failure(self) -> DilocoError | None:
        """Why this process must end; None while it may go on."""
        return self._failure

    def wait_change(self, timeout_s: float) -> None:
        """Return when phase or failure may have changed, or after `timeout_s`."""
        with self._changed:
            self._changed.wait(timeout_s)

    def report(self, report: Report) -> None:
        """Say where the learner is, in its own counters; said again as a heartbeat."""
        self._last_report = report
        speaking = self._speaking
        if speaking is not None:
            step = max(0, report.step - speaking.step)
            tokens = max(0, report.tokens - speaking.tokens)
            speaking.line.report(replace(report, step=step, tokens=tokens))

    def decline(self, decline: Decline) -> None:
        """Answer an ask with nothing."""
        speaking = self._speaking
        if speaking is not None:
            speaking.line.decline(decline)

    def adopted(self, adopted: Adopted) -> None:
        """Say that a version is trained on since `at_step`, in the learner's own counter.

        One adopted before this lease began was told in joining: nothing is said.
        """
        speaking = self._speaking
        if speaking is not None and adopted.at_step >= speaking.step:
            at_step = adopted.at_step - speaking.step
            speaking.line.adopted(replace(adopted, at_step=at_step))

    def evaluated(self, evaluation: Evaluation) -> None:
        """Report a held-out loss."""
        speaking = self._speaking
        if speaking is not None:
            speaking.line.evaluated(evaluation)

    def stop(self, reason: str) -> None:
        """Say what is queued, give the lease back, end. Bounded by the link's deadlines."""
        self._stopping.set()
        self._broken.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._speaking is not None:
            self._speaking.line.close()
        if self._lease is not None and self._failure is None:
            try:
                self._link.leave(self._lease, reason)
            except DilocoError as error:
                _log.info("leave_unheard", reason=str(error))

    def _join(self) -> Welcome:
        welcome = self._link.join(self._hello())
        self._lease = welcome.lease
        self._heartbeat_s = welcome.heartbeat_s
        self._began = self._on_welcome(welcome)
        self._note(Progress(welcome.global_step, welcome.tokens_trained, welcome.phase))
        return welcome

    def _open(self) -> None:
        self._broken.clear()
        self._goodbye = None
        line = self._link.open_control(self.lease, self._note, self._closed)
        self._speaking = _Speaking(line, *self._began)
        self._on_attached()

    def _note(self, note: ServerNote) -> None:
        match note:
            case Progress():
                with self._changed:
                    self._progress = note
                    self._changed.notify_all()
            case Goodbye():
                self._goodbye = note
                self._on_note(note)
            case _:
                self._on_note(note)

    def _closed(self) -> None:
        self._broken.set()

    def _keep(self) -> None:
        while not self._stopping.is_set():
            if not self._broken.wait(self._heartbeat_s):
                self.report(self._last_report)
                continue
            if self._stopping.is_set():
                return
            self._speaking = None
            goodbye = self._goodbye
            code = goodbye.code if goodbye is not None else None
            reason = goodbye.reason if goodbye is not None else "the stream broke"
            _log.warning("control_lost", reason=reason, code=str(code))
            if goodbye is not None and code in FINAL:
                self._fail(RefusedError(RefusalCode(code), goodbye.reason))
                return
            self._reconnect(join_first=code is not None)

    def _reconnect(self, *, join_first: bool) -> None:
        """Try until it works, or the process ends, or the server says never."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            try:
                if join_first:
                    self._join()
                self._open()
                return
            except RefusedError as error:
                if error.code in FINAL:
                    self._fail(error)
                    return
                _log.warning("join_refused", reason=str(error))
                join_first = True
            except UnreachableError as error:
                _log.warning("server_away", reason=str(error))
            self._stopping.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    def _fail(self, error: DilocoError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
