"""What long streams share: the queue before a control stream, and how all of them end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fragments.errors import BusyError, UnreachableError
from fragments.records import Goodbye, Progress, ServerNote


class NoteQueue:
    """Notes on their way to one control stream: `put` from any thread, iterate from one.

    Bounded: of progress notes in a row only the newest is kept, and when `limit` notes wait, all
    are dropped and the iteration ends with BusyError. The learner then opens a new stream, on
    which open asks are repeated.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._notes: deque[ServerNote] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: Exception | None = None

    def put(self, note: ServerNote) -> None:
        """Takes a note; never blocks or raises. Nothing is taken after the end or a `Goodbye`."""
        with self._changed:
            if self._ended:
                return
            if isinstance(note, Progress) and self._notes and isinstance(self._notes[-1], Progress):
                self._notes[-1] = note
            elif len(self._notes) >= self._limit:
                self._notes.clear()
                self._error = BusyError(
                    f"the control stream fell {self._limit} notes behind: open a new one"
                )
                self._ended = True
            else:
                self._notes.append(note)
                self._ended = isinstance(note, Goodbye)
            self._changed.notify()

    def end(self, error: Exception | None = None) -> None:
        """Drops what waits; the iteration ends, with `error` where there is one."""
        with self._changed:
            self._notes.clear()
            self._error = self._error or error
            self._ended = True
            self._changed.notify()

    def __iter__(self) -> Iterator[ServerNote]:
        """The notes in order, until the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._notes or self._ended)
                if not self._notes:
                    break
                note = self._notes.popleft()
            yield note
        if self._error is not None:
            raise self._error


class OpenStreams:
    """The long streams of a server, so that a stop ends them instead of cutting them."""

    def __init__(self) -> None:
        self._ends: set[Callable[[], None]] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._visits = 0

    @property
    def visits(self) -> int:
        """How often somebody has begun to deal with the server; it only grows."""
        return self._visits

    def visit(self) -> None:
        """Somebody asks what is served here, as everyone does before joining."""
        with self._lock:
            self._visits += 1

    @property
    def stopping(self) -> bool:
        """Whether `end_all` was called."""
        return self._stopping

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._ends)

    @contextmanager
    def opened(self, end: Callable[[], None]) -> Iterator[None]:
        """While inside, `end_all` calls `end`. Raises UnreachableError once that was called."""
        with self._lock:
            if self._stopping:
                raise UnreachableError("the server is stopping: try again when it is back")
            self._ends.add(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.discard(end)

    def end_all(self) -> None:
        """Ends every open stream and refuses new ones."""
        with self._lock:
            self._stopping = True
            ends = list(self._ends)
        for end in ends:
            end()
