"""Answers asks: one thread that quantizes, encodes and pushes."""

from __future__ import annotations

import threading

import structlog

from fragments.errors import DilocoError, RefusedError
from fragments.records import Ask, Contribution, Decline
from learner.island import Island
from learner.ports import Link
from learner.session import Session

_log = structlog.get_logger(__name__)


class Outbox:
    """At most one ask per fragment waits; a newer one replaces it.

    A contribution whose push did not come through is kept and sent again, the
    same bytes, once the server is back: if it had counted, the server says so.
    """

    def __init__(self, island: Island, link: Link, session: Session) -> None:
        self._island = island
        self._link = link
        self._session = session
        self._asks: dict[int, Ask] = {}
        self._unsent: dict[int, Contribution] = {}
        self._ready = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self.pushed = 0

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more; a push that is under way is not waited for."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()

    def ask(self, ask: Ask) -> None:
        """Queue an ask; never blocks."""
        with self._ready:
            self._asks[ask.fragment] = ask
            self._ready.notify_all()

    def retry(self) -> None:
        """A stream has been opened: send again what did not come through."""
        with self._ready:
            self._ready.notify_all()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            self._deliver(work)

    def _next(self) -> Ask | Contribution | None:
        with self._ready:
            while not self._stopping:
                if self._asks:
                    return self._asks.pop(next(iter(self._asks)))
                if self._unsent:
                    return self._unsent.pop(next(iter(self._unsent)))
                self._ready.wait()
            return None

    def _deliver(self, work: Ask | Contribution) -> None:
        answer: Contribution | Decline
        if isinstance(work, Contribution):
            answer = work
        else:
            kept = self._unsent.pop(work.fragment, None)
            answer = kept if kept is not None else self._island.answer(work)
        if isinstance(answer, Decline):
            self._session.decline(answer)
            return
        fragment = answer.key.fragment
        try:
            receipt = self._link.push(self._session.lease, answer)
        except RefusedError as error:
            _log.warning("push_refused", fragment=fragment, code=error.code, reason=str(error))
        except DilocoError as error:
            _log.warning("push_unsent", fragment=fragment, reason=str(error))
            with self._ready:
                if not self._stopping:
                    self._unsent[fragment] = answer
                    # Woken by `retry`, or by the next ask; never in a busy loop.
                    self._ready.wait()
        else:
            self.pushed += 1
            _log.debug("pushed", fragment=fragment, late=receipt.late)
