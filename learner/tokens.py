"""Trained tokens of the whole run, as one learner knows them."""

from __future__ import annotations


class TokenClock:
    """Trained tokens of all learners, extrapolated from this learner's own while cut off.

    Monotone, unless the server goes back to a snapshot. Between two reports of
    the server the run is taken to go on at the ratio to this learner's own tokens
    that was last observed.
    """

    def __init__(self) -> None:
        self._anchor: tuple[int, int] | None = None
        self._ratio = 1.0
        self._largest = 0.0

    def observe(self, run_tokens: int, own_tokens: int) -> None:
        """The server says `run_tokens` while this learner has trained `own_tokens`."""
        if self._anchor is not None:
            own = own_tokens - self._anchor[1]
            run = run_tokens - self._anchor[0]
            if run < 0:
                self._anchor, self._largest = (run_tokens, own_tokens), 0.0
                return
            if own <= 0:
                return
            self._ratio = 0.5 * self._ratio + 0.5 * run / own
        self._anchor = (run_tokens, own_tokens)

    def estimate(self, own_tokens: int) -> float:
        """Trained tokens of all learners now."""
        if self._anchor is not None:
            run, own = self._anchor
            self._largest = max(self._largest, run + self._ratio * max(0, own_tokens - own))
        return self._largest
