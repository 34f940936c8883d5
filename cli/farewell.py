"""When a server that is there for one run has nothing more to do."""

from __future__ import annotations

LINGER_S = 30.0
"""Nobody has been there for so long: who starts beside the server of a finished run is told so."""

PATIENCE_S = 300.0
"""Who is still there so long after the end is not waited for."""


class Farewell:
    """Looks at a run again and again and says when its server may end.

    That is when the run is finished and, `linger_s` long, nobody had a stream open or came to ask
    (`visits`, a count that only grows); at the latest `patience_s` after the run was first seen
    finished.
    """

    def __init__(self, linger_s: float = LINGER_S, patience_s: float = PATIENCE_S) -> None:
        self._linger_s = linger_s
        self._patience_s = patience_s
        self._finished_s: float | None = None
        self._alone_s: float | None = None
        self._visits = 0

    def is_over(self, now_s: float, *, finished: bool, open_streams: int, visits: int = 0) -> bool:
        """One look, at `now_s`."""
        if not finished:
            self._finished_s = self._alone_s = None
            return False
        if self._finished_s is None:
            self._finished_s = now_s
        if open_streams:
            self._alone_s = None
        elif self._alone_s is None or visits > self._visits:
            self._alone_s = now_s
        self._visits = visits
        is_alone = self._alone_s is not None and now_s - self._alone_s >= self._linger_s
        return is_alone or now_s - self._finished_s >= self._patience_s
