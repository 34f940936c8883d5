"""The lease and the control stream of one process, kept alive by a thread of its own.

A server that is away stops nobody: the session tries again, with growing
jittered pauses, for as long as the process lives, while training goes on.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

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
"""Before a try to reach the server: doubled each time until the server is heard, jittered."""

STOP_S = 1.0
"""Longest wait for a reconnecting session at the end."""

FINAL = frozenset({RefusalCode.FENCED, RefusalCode.MISMATCH, RefusalCode.FULL})
"""Refusals after which trying again would be wrong."""

_log = structlog.get_logger(__name__)


class Session:
    """Joins, keeps the control stream open, and joins again where that breaks.

    Counters are the process's own and cumulative, so whatever a broken stream
    swallowed is made good by saying the newest again on the next one.

    Args:
        link: the outer server.
        hello: makes the request to join from the process's present state.
        on_welcome: called with every grant, before its stream opens.
        on_attached: called whenever the server is heard on a new stream, from the link's thread;
            must not block.
        on_note: asks, publications and goodbyes, from the link's thread; must not block.
    """

    def __init__(
        self,
        link: Link,
        hello: Callable[[], Hello],
        on_welcome: Callable[[Welcome], None],
        on_attached: Callable[[], None],
        on_note: Callable[[ServerNote], None],
    ) -> None:
        self._link = link
        self._hello = hello
        self._on_welcome = on_welcome
        self._on_attached = on_attached
        self._on_note = on_note
        # Guards the line and what is to be said on it, so that nothing is said between the two.
        self._lock = threading.Lock()
        self._line: ControlLine | None = None
        self._report = Report(step=0, tokens=0, cursor=0)
        self._adopted: dict[int, Adopted] = {}
        self._welcome: Welcome | None = None
        self._goodbye: Goodbye | None = None
        self._heard = False
        self._heartbeat_s = 1.0
        self._away_since_s: float | None = None
        self._broken = threading.Event()
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._progress = Progress(0, 0, Phase.WAITING)
        self._failure: DilocoError | None = None
        self._thread = threading.Thread(target=self._run, name="session", daemon=True)

    def start(self, stop: threading.Event, patience_s: float) -> Welcome | None:
        """Join and open the stream, as soon as the server is there; None where `stop` is set first.

        Raises RefusedError, or UnreachableError when it is not there within `patience_s`.
        """
        deadline_s, pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S
        while not stop.is_set():
            try:
                welcome = self._join()
                self._open()
            except UnreachableError as error:
                if time.monotonic() + pause_s > deadline_s:
                    raise
                self._lost("server_away", str(error))
            else:
                self._thread.start()
                return welcome
            stop.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
        return None

    @property
    def welcome(self) -> Welcome:
        """The newest grant. Raises RuntimeError before `start`."""
        if self._welcome is None:
            raise RuntimeError("the session has not joined yet")
        return self._welcome

    @property
    def lease(self) -> Lease:
        """The lease now held. Raises RuntimeError before `start`."""
        return self.welcome.lease

    @property
    def is_attached(self) -> bool:
        """Whether the server has said something on the stream that is open."""
        return self._line is not None and self._heard

    @property
    def progress(self) -> Progress:
        """The run's clock and phase as last heard."""
        return self._progress

    @property
    def failure(self) -> DilocoError | None:
        """Why this process must end; None while it may go on."""
        return self._failure

    def fail(self, error: DilocoError) -> None:
        """This process cannot go on: whoever waits on the session hears of it."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def wait_change(self, timeout_s: float) -> None:
        """Return when phase or failure may have changed, or after `timeout_s`."""
        with self._changed:
            self._changed.wait(timeout_s)

    def report(self, report: Report) -> None:
        """Say where the learner is; said again as a heartbeat."""
        with self._lock:
            self._report = report
            if self._line is not None:
                self._line.report(report)

    def adopted(self, adopted: Adopted) -> None:
        """Say that a version is trained on; said again on every new stream."""
        with self._lock:
            self._adopted[adopted.fragment] = adopted
            if self._line is not None:
                self._line.adopted(adopted)

    def decline(self, decline: Decline) -> None:
        """Answer an ask with nothing. Lost where no stream is open: open asks come again."""
        with self._lock:
            if self._line is not None:
                self._line.decline(decline)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Report a held-out loss. Lost where no stream is open."""
        with self._lock:
            if self._line is not None:
                self._line.evaluated(evaluation)

    def stop(self, reason: str) -> None:
        """Say what is queued, give the lease back, end; within a few seconds."""
        self._stopping.set()
        self._broken.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        with self._lock:
            line, self._line = self._line, None
        if line is not None:
            line.close()
        if line is not None and self._failure is None:
            self._link.leave(self.lease, reason)

    def _join(self) -> Welcome:
        welcome = self._link.join(self._hello())
        self._welcome = welcome
        self._heartbeat_s = welcome.heartbeat_s
        self._on_welcome(welcome)
        self._note(
            replace(
                self._progress,
                global_step=welcome.global_step,
                tokens_trained=welcome.tokens_trained,
                phase=welcome.phase,
            )
        )
        return welcome

    def _open(self) -> None:
        self._broken.clear()
        self._goodbye, self._heard = None, False
        with self._lock:
            self._line = self._link.open_control(self.lease, self._note_on_stream, self._closed)
            for adopted in self._adopted.values():
                self._line.adopted(adopted)
            self._line.report(self._report)

    def _lost(self, what: str, reason: str) -> None:
        """Say that the server is away: once, until it is back, and then at each try at debug."""
        log = _log.warning if self._away_since_s is None else _log.debug
        log(what, reason=reason)
        if self._away_since_s is None:
            self._away_since_s = time.monotonic()

    def _note_on_stream(self, note: ServerNote) -> None:
        away_since_s, self._away_since_s = self._away_since_s, None
        if away_since_s is not None:
            _log.info("server_back", away_s=round(time.monotonic() - away_since_s, 1))
        if not self._heard:
            self._heard = True
            self._on_attached()
        self._note(note)

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

    def _run(self) -> None:
        try:
            self._keep()
        except Exception as error:  # noqa: BLE001  a dead session would leave training alone
            _log.exception("session_failed")
            self.fail(DilocoError(f"internal error in the session: {error}"))

    def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            if not self._broken.wait(self._heartbeat_s):
                self._beat()
                continue
            if self._stopping.is_set():
                return
            with self._lock:
                self._line = None
            goodbye = self._goodbye
            code = goodbye.code if goodbye is not None else None
            if goodbye is not None:
                _log.warning("control_lost", reason=goodbye.reason, code=str(code))
            else:
                self._lost("control_lost", "the stream broke: training goes on meanwhile")
            if goodbye is not None and code in FINAL:
                self.fail(RefusedError(RefusalCode(code), goodbye.reason))
                return
            pause_s = FIRST_PAUSE_S if self._heard else min(LONGEST_PAUSE_S, pause_s * 2)
            self._reconnect(pause_s)

    def _beat(self) -> None:
        with self._lock:
            if self._line is not None:
                self._line.report(self._report)

    def _reconnect(self, pause_s: float) -> None:
        """Try until a stream is open, or the process ends, or the server says never.

        This joins again though the lease may last: only a grant says which contributions arrived,
        and lets what was trained meanwhile count as one step of the run's clock instead of as many
        slots that are due at once.
        """
        while not self._stopping.wait(pause_s * random.uniform(0.5, 1.0)):
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
            try:
                self._join()
                self._open()
                return
            except RefusedError as error:
                if error.code in FINAL:
                    self.fail(error)
                    return
                _log.warning("join_refused", reason=str(error))
            except UnreachableError as error:
                self._lost("server_away", str(error))
