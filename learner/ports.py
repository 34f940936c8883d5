"""What a learner needs of the outer server, as one small protocol.

`services.client` implements it over gRPC, tests in process, the simulation
over a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fragments.records import (
    Adopted,
    Contribution,
    Decline,
    Evaluation,
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


class ControlLine(Protocol):
    """The sending half of a control stream. No method raises, and none but `close` blocks.

    Of `report` only the newest is kept when the line is slow; the others are
    queued in order. On a broken line everything is dropped: the owner opens a
    new one and sends its newest state again.
    """

    def report(self, report: Report) -> None:
        """Say where the learner is."""

    def decline(self, decline: Decline) -> None:
        """Answer an ask with nothing."""

    def adopted(self, adopted: Adopted) -> None:
        """Say that a version is trained on."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """Report a held-out loss (evaluators only)."""

    def close(self) -> None:
        """End the stream once the server has read what is queued, within about two seconds;
        `on_closed` is not called.
        """


class Link(Protocol):
    """The outer server as a learner sees it. Thread-safe.

    Every call is bounded in time. Refusals raise `RefusedError`; a server that
    cannot be reached within the bounded retries raises `UnreachableError`.
    """

    @property
    def arrived_bytes(self) -> int:
        """Payload bytes pulled so far: whoever waits for weights sees whether anything moves."""

    def describe(self) -> RunDescription:
        """What is trained here."""

    def join(self, hello: Hello) -> Welcome:
        """Take the lease for a name."""

    def open_control(
        self,
        lease: Lease,
        on_note: Callable[[ServerNote], None],
        on_closed: Callable[[], None],
    ) -> ControlLine:
        """Open the control stream of a lease.

        `on_note` is called in order from one thread of the link; `on_closed`
        once from that thread when the stream ends for any reason but `close`
        (a `Goodbye` note, where there was one, came before).
        """

    def push(self, lease: Lease, contribution: Contribution) -> Receipt:
        """Deliver a contribution; retried inside, so that it counts once."""

    def pull(self, lease: Lease, fragment: int, have: Version | None) -> tuple[Update, ...]:
        """What brings `fragment` from `have` to the newest version, oldest first."""

    def leave(self, lease: Lease, reason: str) -> None:
        """Give the lease back: one short try, and no error if it fails."""

    def close(self) -> None:
        """Close all channels."""
