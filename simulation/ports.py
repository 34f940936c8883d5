"""What a simulated learner needs of whatever serves it: rounds, or pushes applied alone."""

from __future__ import annotations

from typing import Protocol

from fragments.records import Contribution, Lease, Update, Version
from outer_server.core.events import Event, Reply
from outer_server.core.state import RunState
from outer_server.core.step import FragmentParameters
from outer_server.holdings import Sink


class Server(Protocol):
    """An outer server on the virtual clock. It calls sinks while it is being called: a sink must
    only schedule, never call back.
    """

    state: RunState

    @property
    def published(self) -> list[FragmentParameters]:
        """All fragments as learners may pull them."""
        ...

    def call(self, event: Event, sink: Sink | None = None) -> Reply:
        """Handle one event at the present moment; its reply, if it has one."""
        ...

    def contribute(self, lease: Lease, contribution: Contribution) -> Reply:
        """Take a contribution that has arrived whole."""
        ...

    def updates(self, fragment: int, have: Version | None) -> tuple[Update, ...]:
        """What leads from `have` to the newest version."""
        ...

    def detach(self, learner: str) -> None:
        """The stream of a learner broke."""
        ...
