"""What the services need of the outer server: the one thing that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fragments.records import (
    Adopted,
    Answered,
    Contribution,
    ContributionKey,
    Decline,
    Evaluation,
    Hello,
    Lease,
    Receipt,
    Report,
    RunDescription,
    RunStatus,
    ServerNote,
    Update,
    Version,
    Welcome,
)

Sink = Callable[[ServerNote], None]
"""Takes a note for one control stream at once: it neither blocks nor raises."""


class OuterPort(Protocol):
    """The outer server. Thread-safe; refusals raise `RefusedError`."""

    @property
    def generation(self) -> int:
        """Raised durably at each start."""

    def describe(self) -> RunDescription:
        """The run; where bulk is served is filled in by the services."""

    def join(self, hello: Hello) -> Welcome:
        """Grant the lease for a name, or refuse."""

    def attach(self, lease: Lease, sink: Sink) -> None:
        """Send this lease's notes to `sink` from now on, open asks first.

        A second attach replaces the first, whose sink gets a `Goodbye`.
        """

    def detach(self, lease: Lease, sink: Sink) -> None:
        """Stop sending to `sink`; nothing happens if it was replaced already."""

    def report(self, lease: Lease, report: Report) -> None:
        """Take a position. Only queues; refuses a lease that is fenced or lost."""

    def decline(self, lease: Lease, decline: Decline) -> None:
        """Take a "nothing from me"; as `report`."""

    def adopted(self, lease: Lease, adopted: Adopted) -> None:
        """Take an adoption; as `report`."""

    def evaluated(self, lease: Lease, evaluation: Evaluation) -> None:
        """Take a held-out loss; as `report`."""

    def leave(self, lease: Lease, reason: str) -> None:
        """Take the lease back. Idempotent."""

    def admit(self, lease: Lease, key: ContributionKey) -> None:
        """Refuse, cheaply, a contribution whose bytes are not worth receiving.

        A key that was accepted before passes: its repetition gets the first receipt again.
        """

    def contribute(self, lease: Lease, contribution: Contribution) -> Receipt:
        """Take a contribution durably, once."""

    def updates(self, lease: Lease, fragment: int, have: Version | None) -> tuple[Update, ...]:
        """What brings a holder of `have` to the newest version; immutable, shared by all.

        Refuses (MISMATCH) a fragment that the layout does not have.
        """

    def count_bytes(self, learner: str, up: int, down: int) -> None:
        """Add to a learner's bulk traffic, in bytes of serialized messages. Cheap."""

    def status(self) -> RunStatus:
        """A snapshot; never waits for the training."""

    @property
    def codec(self) -> str:
        """Id of the codec in which contributions travel."""

    def payload_limit(self, fragment: int) -> int:
        """Largest acceptable wire size of a contribution to this fragment, bytes.

        Refuses (MISMATCH) a fragment that the layout does not have.
        """


class AdminPort(Protocol):
    """What an operator may do to a run. Thread-safe; each call is answered once it is durable.

    Raises SettingsError for what cannot be done, BusyError or StorageError for what cannot be done
    now; nothing has changed then.
    """

    def drain(self, reason: str) -> Answered:
        """Open no more rounds until `release`."""

    def stop(self, reason: str) -> Answered:
        """Have the server end; answered before that."""

    def evict(self, name: str, reason: str, for_s: float | None, *, drop: bool) -> Answered:
        """End a name's lease and grant it no other until `release`, or for a time; `drop` what it
        has sent and no round has taken.
        """

    def release(self, name: str | None, reason: str) -> Answered:
        """Undo `evict` for a name, or `drain` where there is none."""

    def change(self, changes: tuple[tuple[str, str], ...], reason: str) -> Answered:
        """Change settings of the run, given as texts by dotted key; all or none."""

    def roll_back(self, snapshot: str, up_to_version: int | None, reason: str) -> Answered:
        """Go back to a snapshot: by name, or for "" the newest, up to a version if one is given."""

    def snapshot(self) -> Answered:
        """Write a snapshot now."""
