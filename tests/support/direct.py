"""`learner.ports.Link` straight onto an `OuterServer`, in one process, without a network."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from fragments.errors import RefusedError
from fragments.records import (
    Adopted,
    Contribution,
    Decline,
    Evaluation,
    Goodbye,
    Hello,
    Lease,
    Receipt,
    Report,
    RunDescription,
    ServerNote,
    Update,
    Version,
    Welcome,
)
from outer_server.server import OuterServer


class DirectLine:
    """A control stream: notes are handed on by a thread of their own, as over a network."""

    def __init__(
        self,
        server: OuterServer,
        lease: Lease,
        on_note: Callable[[ServerNote], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._server = server
        self._lease = lease
        self._on_note = on_note
        self._on_closed = on_closed
        self._notes: queue.SimpleQueue[ServerNote | None] = queue.SimpleQueue()
        self._open = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        try:
            server.attach(lease, self._notes.put)
        except RefusedError as error:
            self._notes.put(Goodbye(error.code, str(error)))

    def _run(self) -> None:
        while self._open:
            note = self._notes.get()
            if note is None:
                return
            self._on_note(note)
            if isinstance(note, Goodbye):
                self._open = False
                self._on_closed()

    def _say(self, call: Callable[[], None]) -> None:
        if not self._open:
            return
        try:
            call()
        except RefusedError as error:
            self._notes.put(Goodbye(error.code, str(error)))

    def report(self, report: Report) -> None:
        self._say(lambda: self._server.report(self._lease, report))

    def decline(self, decline: Decline) -> None:
        self._say(lambda: self._server.decline(self._lease, decline))

    def adopted(self, adopted: Adopted) -> None:
        self._say(lambda: self._server.adopted(self._lease, adopted))

    def evaluated(self, evaluation: Evaluation) -> None:
        self._say(lambda: self._server.evaluated(self._lease, evaluation))

    def close(self) -> None:
        self._open = False
        self._notes.put(None)


class DirectLink:
    """The outer server as a learner sees it."""

    def __init__(self, server: OuterServer) -> None:
        self.server = server
        self.arrived_bytes = 0

    def describe(self) -> RunDescription:
        return self.server.describe()

    def join(self, hello: Hello) -> Welcome:
        return self.server.join(hello)

    def open_control(
        self,
        lease: Lease,
        on_note: Callable[[ServerNote], None],
        on_closed: Callable[[], None],
    ) -> DirectLine:
        return DirectLine(self.server, lease, on_note, on_closed)

    def push(self, lease: Lease, contribution: Contribution) -> Receipt:
        return self.server.contribute(lease, contribution)

    def pull(self, lease: Lease, fragment: int, have: Version | None) -> tuple[Update, ...]:
        updates = self.server.updates(lease, fragment, have)
        self.arrived_bytes += sum(len(update.payload.data) for update in updates)
        return updates

    def leave(self, lease: Lease, reason: str) -> None:
        self.server.leave(lease, reason)

    def close(self) -> None:
        pass
