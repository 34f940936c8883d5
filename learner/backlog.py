"""Whether training outruns the transfers of one direction."""

from __future__ import annotations

from collections.abc import Callable


class Backlog:
    """For how many steps a worker has had something to do without a pause.

    One thread says `busy` and `idle`; any may read `steps`.

    Args:
        step: the learner's newest completed step.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._since: int | None = None

    def busy(self) -> None:
        """Something waits or is under way; said again, it changes nothing."""
        if self._since is None:
            self._since = self._step()

    def idle(self) -> None:
        """Nothing waits, or what waits cannot be done now: the server is away."""
        self._since = None

    @property
    def steps(self) -> int:
        """Steps made since it was last idle; 0 while it is."""
        since = self._since
        return 0 if since is None else self._step() - since
