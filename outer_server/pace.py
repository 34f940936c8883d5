"""How fast a run trains now, from looks at its state."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from fragments.records import Role
from outer_server.core.state import RunState

WINDOW_S = 10.0
"""The rate is that of about so long."""

APART_S = 1.0
"""Looks that are closer to the one before are not kept."""

_Trained = Mapping[str, tuple[int, int]]
"""Of each learner that has made a step in its lease, which that is, and its tokens."""


class Pace:
    """Trained tokens a second. One thread at a time may use it.

    What a learner tells of on its first report to a server was trained before, while that was away
    or before it was restarted: it counts for the run, and not for its pace.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, _Trained]] = deque(maxlen=64)

    def look(self, state: RunState, now_s: float) -> float:
        """The pace at this moment; 0 at the first look."""
        looks, now = self._looks, _trained(state)
        while len(looks) > 1 and now_s - looks[1][0] >= WINDOW_S:
            looks.popleft()
        told = [*(trained for _, trained in looks), now]
        elapsed_s = now_s - looks[0][0] if looks else 0.0
        if not looks or now_s - looks[-1][0] >= APART_S:
            looks.append((now_s, now))
        tokens = sum(map(_between, told, told[1:]))
        return tokens / elapsed_s if elapsed_s > 0 else 0.0


def _trained(state: RunState) -> _Trained:
    return {
        record.name: (record.token, record.tally.tokens + record.report.tokens)
        for record in state.learners.values()
        if record.role is Role.LEARNER and record.has_stepped
    }


def _between(before: _Trained, after: _Trained) -> int:
    """What was trained from one look to the next by those who were there at both."""
    return sum(
        max(0, tokens - before[name][1])
        for name, (token, tokens) in after.items()
        if name in before and before[name][0] == token
    )
