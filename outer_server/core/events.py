"""What the scheduler is told (events) and what it wants done (effects)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from fragments.records import (
    Adopted,
    Answered,
    ContributionKey,
    Decline,
    Evaluation,
    Hello,
    Receipt,
    Refusal,
    Report,
    ServerNote,
    Version,
    Welcome,
)
from outer_server.core.state import ContributionMeta, MergeOrder, RunState, SlotClock


@dataclass(frozen=True, slots=True)
class Join:
    """A process asks for the lease of a name. Replied with Welcome or Refusal."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class Leave:
    """The holder of a lease gives it back."""

    learner: str
    token: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A report from the holder of `token`."""

    learner: str
    token: int
    report: Report


@dataclass(frozen=True, slots=True)
class Declined:
    """An ask is answered with nothing."""

    learner: str
    token: int
    decline: Decline


@dataclass(frozen=True, slots=True)
class HasAdopted:
    """A learner trains on a version from now on."""

    learner: str
    token: int
    adopted: Adopted


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluator reports a held-out loss."""

    learner: str
    token: int
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Contributed:
    """A whole, checked contribution is here. Replied with Receipt or Refusal. `base_digest`: of the
    values that it is relative to, as its sender says; "" where it does not.
    """

    learner: str
    token: int
    meta: ContributionMeta
    asked_version: Version
    payload_digest: str
    base_digest: str = ""


@dataclass(frozen=True, slots=True)
class Attached:
    """A control stream was opened: open asks are to be repeated on it."""

    learner: str
    token: int


@dataclass(frozen=True, slots=True)
class Merged:
    """The merge of a round is done: `version` of the fragment exists.

    `refused`: why the round's contributions could not be merged (no finite
    result, an unreadable payload); the version then has the old value. `epoch`: the one that it
    was made in; in another it is of no use.
    """

    fragment: int
    version: int
    digest: str
    order: MergeOrder
    refused: str | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A server goes on with the run, as `core.resume` has it; times count from now. `digests`: of
    what its fragments are, where it could not compute the bits that the tape tells of; else empty.

    `reason`: why it begins an epoch, "" where it does not. `keeps`: contributions that wait come
    along into that, under the names that they would have there. `hold_s`: so long at most rounds
    are kept back for learners whose leases last and who are not heard yet.
    """

    generation: int
    epoch: int
    digests: tuple[str, ...] = ()
    reason: str = ""
    keeps: bool = False
    hold_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Drain:
    """The server is about to stop: open no more rounds."""

    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """An operator drains the run: no more rounds until it is released. This and the following are
    replied with Answered or Denied.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """An operator ends a name's lease and refuses it another, for a time or until it is released.

    `drop`: what it has sent and no round has taken is let go of, as if it had never come.
    """

    name: str
    reason: str
    for_s: float | None = None
    drop: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """An operator lets a name join again, or rounds open again where `name` is None."""

    name: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """An operator changes settings of the run: keys and values, as `fragments.changes` has them."""

    changes: tuple[tuple[str, str], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Point:
    """What a snapshot says of the run as it was then, but for its values and its learners.

    `fragments`: version and digest of each.
    """

    snapshot: str
    fragments: tuple[tuple[int, str], ...]
    slots: SlotClock
    global_step: int
    tokens_trained: int
    tokens_pushed: int
    tokens_merged: int
    rounds_merged: int
    rounds_abandoned: int

    @staticmethod
    def of(snapshot: str, state: RunState) -> Point:
        """What a snapshot of that name says of `state`."""
        return Point(
            snapshot=snapshot,
            fragments=tuple((fragment.version, fragment.digest) for fragment in state.fragments),
            slots=state.slots,
            global_step=state.global_step,
            tokens_trained=state.tokens_trained,
            tokens_pushed=state.tokens_pushed,
            tokens_merged=state.tokens_merged,
            rounds_merged=state.rounds_merged,
            rounds_abandoned=state.rounds_abandoned,
        )


@dataclass(frozen=True, slots=True)
class RollBack:
    """An operator goes back to a snapshot, in a new epoch."""

    point: Point
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but time has passed."""


Event: TypeAlias = (
    Join
    | Leave
    | Reported
    | Declined
    | HasAdopted
    | Evaluated
    | Contributed
    | Attached
    | Merged
    | Started
    | Drain
    | Hold
    | Evict
    | Release
    | Change
    | RollBack
    | Tick
)


@dataclass(frozen=True, slots=True)
class Send:
    """Say `note` to one process, or to every attached one where `learner` is None."""

    learner: str | None
    note: ServerNote


@dataclass(frozen=True, slots=True)
class StartMerge:
    """Have the merge done; answer with Merged, its `refused` set where it could not be."""

    order: MergeOrder


@dataclass(frozen=True, slots=True)
class Publish:
    """`version` of a fragment may be pulled from now on."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Discard:
    """The bytes of these contributions are needed no more."""

    keys: tuple[ContributionKey, ...]


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End the control stream of this process after `note`."""

    learner: str
    note: ServerNote


@dataclass(frozen=True, slots=True)
class Note:
    """A change of state for the event log, with its reason."""

    what: str
    reason: str
    fields: tuple[tuple[str, str | int | float], ...] = ()


Effect: TypeAlias = Send | StartMerge | Publish | Discard | Disconnect | Note


@dataclass(frozen=True, slots=True)
class Denied:
    """Nothing of what an operator asked for has happened, and why."""

    reason: str


Reply: TypeAlias = Welcome | Receipt | Refusal | Answered | Denied | None
