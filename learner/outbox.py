"""Answers asks: one thread that quantizes, encodes and pushes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from fragments.errors import DilocoError, RefusedError
from fragments.records import Ask, Contribution, Decline, DeclineReason, Receipt, RefusalCode
from learner.backlog import Backlog
from learner.island import Island
from learner.ports import Link
from learner.program import Shard
from learner.session import Session

PAUSE_S = 1.0
"""After a push that did not come through, before the next try, unless something happens."""

STOP_S = 0.5
"""Longest wait at the end for a push under way."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Made:
    """An answer, and the part of the data that it was trained on."""

    contribution: Contribution
    shard: Shard


class Outbox:
    """At most one ask per fragment waits; a newer one replaces it.

    A contribution whose push did not come through is kept and sent again, the
    same bytes, once the server is back: if it had counted, the server says so. Where the server has
    said at a join that it never arrived, it is made again, of all that was trained since.
    `on_receipt` is called with each that the server has, from the outbox's thread.
    """

    def __init__(
        self,
        island: Island,
        link: Link,
        session: Session,
        on_receipt: Callable[[Contribution, Receipt], None] = lambda _what, _receipt: None,
    ) -> None:
        self._island = island
        self._link = link
        self._session = session
        self._on_receipt = on_receipt
        self._asks: dict[int, Ask] = {}
        self._unsent: dict[int, _Made] = {}
        self._changed = threading.Condition()
        self.backlog = Backlog(lambda: island.completed.step)
        self._news = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more; a push that is under way is hardly waited for."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def ask(self, ask: Ask) -> None:
        """Queue an ask; never blocks."""
        with self._changed:
            self._asks[ask.fragment] = ask
            self._tell()

    def retry(self) -> None:
        """A stream has been opened: send again what did not come through."""
        with self._changed:
            self._tell()

    def _tell(self) -> None:
        self._news += 1
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                self._deliver(work)
        except Exception as error:  # noqa: BLE001  a dead outbox would leave training alone
            _log.exception("outbox_failed")
            self._session.fail(DilocoError(f"internal error in the outbox: {error}"))

    def _next(self) -> Ask | _Made | None:
        """An unsent contribution goes before a new answer for its fragment."""
        with self._changed:
            while not self._stopping:
                self.backlog.busy()
                for fragment in self._asks:
                    if fragment not in self._unsent:
                        return self._asks.pop(fragment)
                # Not before the session has heard what of it arrived.
                if self._unsent and self._session.is_attached:
                    return self._unsent.pop(next(iter(self._unsent)))
                self.backlog.idle()
                self._changed.wait(PAUSE_S if self._unsent else None)
            return None

    def _deliver(self, work: Ask | _Made) -> None:
        news = self._news
        made = self._answer(work) if isinstance(work, Ask) else self._grown(work)
        if isinstance(made, Decline):
            self._session.decline(made)
            return
        answer, welcome = made.contribution, self._session.welcome
        fragment, lease = answer.key.fragment, welcome.lease
        if made.shard.index != welcome.shard_index:
            _log.warning("push_dropped", fragment=fragment, reason="its data is another's by now")
            self._island.unanswered(answer.key)
            return
        try:
            receipt = self._link.push(lease, answer)
        except RefusedError as error:
            _log.warning("push_refused", fragment=fragment, code=error.code, reason=str(error))
            # With a lease that is lost or renewed the contribution is still good; a process that is
            # fenced off by another ends by its session.
            if error.code in (RefusalCode.LEASE_LOST, RefusalCode.FENCED):
                self._keep(made, news)
            else:
                self._island.refused(answer.key)
        except DilocoError as error:
            _log.warning("push_unsent", fragment=fragment, reason=str(error))
            self._keep(made, news)
        else:
            self._on_receipt(answer, receipt)
            _log.debug("pushed", fragment=fragment, late=receipt.late)

    def _answer(self, ask: Ask) -> _Made | Decline:
        # Before the answer is made: it may be dropped for a shard that it is not of, never sent.
        shard = self._island.completed.shard
        if shard.index != self._session.welcome.shard_index:
            return Decline(ask.fragment, ask.version, DeclineReason.NO_STEPS)
        answer = self._island.answer(ask)
        return answer if isinstance(answer, Decline) else _Made(answer, shard)

    def _grown(self, made: _Made) -> _Made:
        """What never arrived, with the steps of the time since; as it was, where that is not known,
        or it is of a base that is held no more.
        """
        key, version = made.contribution.key, made.contribution.asked_version
        if self._island.may_grow(made.contribution):
            with self._changed:
                ask = self._asks.pop(key.fragment, None)
            version = ask.version if ask is not None else version
            grown = self._answer(Ask(key.fragment, version))
            # A reason to send nothing now is none to give up what there was.
            if isinstance(grown, _Made) and grown.contribution.key == key:
                return grown
        self._island.answered(key)
        return replace(made, contribution=replace(made.contribution, asked_version=version))

    def _keep(self, made: _Made, news: int) -> None:
        """Keep it for another try: when something happens, or after a pause."""
        self.backlog.idle()
        with self._changed:
            self._unsent[made.contribution.key.fragment] = made
            self._changed.wait_for(lambda: self._stopping or self._news != news, PAUSE_S)
