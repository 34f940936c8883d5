"""The fragment values of a snapshot on their way to the disk, each let go of once it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from outer_server.core.step import FragmentParameters


class Unwritten:
    """Values that a snapshot has still to write. One thread writes; any may wait or ask for `len`.

    A value that is replaced while it waits here is in memory twice. Whoever is about to replace one
    waits for it first, and it is written next: so a snapshot keeps hardly more than one fragment
    alive that is nobody else's, however long it takes.
    """

    def __init__(self, fragments: Iterable[FragmentParameters]) -> None:
        self._left = dict(enumerate(fragments))
        self._wanted: list[int] = []
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._left)

    def write(self, write: Callable[[int, FragmentParameters], None]) -> None:
        """Call `write` with each fragment and let go of it. Nothing is left, and nobody waits,
        when this is over, also when `write` raised.
        """
        try:
            while (index := self._next()) is not None:
                write(index, self._left[index])
                with self._changed:
                    del self._left[index]
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._left.clear()
                self._changed.notify_all()

    def wait_written(self, index: int, timeout_s: float) -> bool:
        """Have a fragment written next and wait for it; False if that took too long."""
        with self._changed:
            if index in self._left:
                self._wanted.append(index)
            return self._changed.wait_for(lambda: index not in self._left, timeout_s)

    def _next(self) -> int | None:
        with self._changed:
            wanted = [index for index in self._wanted if index in self._left]
            self._wanted = wanted[1:]
            return wanted[0] if wanted else next(iter(self._left), None)
