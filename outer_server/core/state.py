"""The scheduler's state: immutable values, so that any thread may read a snapshot.

Holds numbers and names only. Tensors and payload bytes live in the engine; the
state refers to a contribution by its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fragments.records import ContributionKey, Evaluation, Phase, Report, Role
from fragments.runspec import OuterSettings, RunSpec


@dataclass(frozen=True, slots=True)
class Base:
    """What one learner holds of one fragment, as far as the server was told.

    `version` -1: nothing of this epoch. `at_step` is the learner's step, in its
    own counter, after which it was adopted. `consumed` is the largest base version that a
    contribution was accepted for, `consumed_payload` that payload's digest; `dropped`: it was late,
    and the run drops late ones.
    """

    version: int = -1
    at_step: int = 0
    consumed: int = -1
    consumed_payload: str = ""
    dropped: bool = False
    digest: str = ""
    asked_version: int = -1
    asked_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Smoothed time from ask to arrival, as TCP smooths round trips (RFC 6298)."""

    mean_s: float = 0.0
    deviation_s: float = 0.0
    samples: int = 0
    missed_in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class Tally:
    """Counters of a learner; steps and tokens without those of its present process."""

    joins: int = 0
    steps: int = 0
    tokens: int = 0
    contributions_merged: int = 0
    tokens_merged: int = 0
    contributions_late: int = 0
    contributions_refused: int = 0


@dataclass(frozen=True, slots=True)
class LearnerRecord:
    """One name that ever joined.

    `report` counts since the process of `incarnation` began; `tally` has the
    steps and tokens of the processes before it. `stepped_at_s`: when the newest
    step was reported or, before the first, all fragments were adopted; None
    before that: it has no say on the clock yet. `has_stepped`: in this lease.
    `starts_count`: its next report only says where its process counts from: the run went
    back to a snapshot, and what was trained since is lost; or the process has trained before it
    came (its name was retired or taken in between, or it goes on with the state of another), and
    what was reported of that is counted already. `replaced`: incarnations of this name that a later
    one has fenced off, the newest last. `passed_over`: [start, stop) of batches between the
    checkpoint that a process went on from and where it was to go on, the newest last; only the
    account of data needs it.
    """

    name: str
    role: Role
    token: int
    incarnation: str
    shard_index: int
    live: bool
    left: bool
    position: int
    report: Report
    heard_at_s: float
    bases: tuple[Base, ...]
    stepped_at_s: float | None = None
    has_stepped: bool = False
    starts_count: bool = False
    cursor: int = 0
    timing: Timing = Timing()
    tally: Tally = Tally()
    replaced: tuple[str, ...] = ()
    passed_over: tuple[tuple[int, int], ...] = ()

    def with_base(self, fragment: int, base: Base) -> LearnerRecord:
        """This record with another base of one fragment."""
        bases = (*self.bases[:fragment], base, *self.bases[fragment + 1 :])
        return replace(self, bases=bases)


@dataclass(frozen=True, slots=True)
class ContributionMeta:
    """An accepted contribution without its bytes."""

    key: ContributionKey
    steps: int
    tokens: int
    cursor_from: int
    cursor_to: int


@dataclass(frozen=True, slots=True)
class Participant:
    """One learner's part in a merge: its contributions, oldest base first, and
    its share of the round's weight (shares sum to 1).
    """

    learner: str
    contributions: tuple[ContributionMeta, ...]
    share: float


@dataclass(frozen=True, slots=True)
class MergeOrder:
    """Merge these, in this order, and take `fragment` from `version` to the next.

    `closing`: not by an outer step, but to the mean of what the participants hold. `merge` and
    `outer`: the settings in force when the round closed, since they may change before the work is
    done; without them, those that the run was made with.
    """

    fragment: int
    version: int
    participants: tuple[Participant, ...]
    closing: bool = False
    merge: str = ""
    outer: OuterSettings | None = None

    @property
    def contributions(self) -> tuple[ContributionMeta, ...]:
        """All contributions, in merge order."""
        return tuple(meta for p in self.participants for meta in p.contributions)


class RoundStage(StrEnum):
    """COLLECTING answers, or MERGING them (no answer enters any more)."""

    COLLECTING = "collecting"
    MERGING = "merging"


@dataclass(frozen=True, slots=True)
class Round:
    """An open round that supersedes `version` of its fragment. `order`: what is being
    merged, once its stage is MERGING.
    """

    fragment: int
    version: int
    opened_at_s: float
    opened_at_step: int
    asked: tuple[str, ...]
    answered: frozenset[str] = frozenset()
    declined: frozenset[str] = frozenset()
    stage: RoundStage = RoundStage.COLLECTING
    quorum_at_s: float | None = None
    order: MergeOrder | None = None


@dataclass(frozen=True, slots=True)
class FragmentState:
    """One fragment. `arrived` are the contributions that no closed round took:
    answers of the open round, and late ones that wait for the next. `past`: digests of the versions
    before this one, the newest last, as far back as contributions may reach.
    """

    version: int = 0
    digest: str = ""
    round: Round | None = None
    arrived: tuple[ContributionMeta, ...] = ()
    closed_at_s: float | None = None
    past: tuple[str, ...] = ()

    def digest_of(self, version: int) -> str | None:
        """Of the values that this epoch has at a version; None where that is not known."""
        behind = self.version - version
        if behind == 0:
            return self.digest
        return self.past[-behind] if 0 < behind <= len(self.past) else None

    def followed_by(self, version: int, digest: str, kept: int) -> FragmentState:
        """This fragment at its next version, with no round; the last `kept` are remembered."""
        past = (*self.past, self.digest)[-kept:] if kept else ()
        return replace(self, version=version, digest=digest, round=None, past=past)


@dataclass(frozen=True, slots=True)
class Averages:
    """Moving averages of the paper's grace rule, in seconds: xi_step, xi_quorum (opening
    to the K_eff-th answer) and xi_sync (closing to the first adoption). 0 before a sample.
    """

    step_s: float = 0.0
    quorum_s: float = 0.0
    sync_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotClock:
    """When fragments are due: slot k falls at anchor_step + (k - anchor_slot)*H//P
    and is that of fragment k mod P. `interval` is the H that was in force at the
    anchor and is until the next slot passes.
    """

    next_slot: int
    anchor_slot: int
    anchor_step: int
    interval: int


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """A reported held-out loss."""

    evaluator: str
    at_s: float
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Eviction:
    """Why a name gets no lease, since when, and for how long; None: until it is released."""

    reason: str
    since_s: float
    for_s: float | None = None


@dataclass(frozen=True, slots=True)
class Rollback:
    """`epoch` began with the values of `snapshot`, whose rounds were so many."""

    epoch: int
    snapshot: str
    rounds_merged: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything that the scheduler knows of a run.

    `stopping`: the server is about to end. `held`: why an operator has drained the run, "" where
    none has. `evicted`: by name. `rollbacks`: the newest, oldest first. `held_back_until_s`: see
    `Started.hold_s`.
    """

    spec: RunSpec
    epoch: int
    generation: int
    fragments: tuple[FragmentState, ...]
    slots: SlotClock
    phase: Phase = Phase.WAITING
    phase_reason: str = "no learner has joined yet"
    learners: Mapping[str, LearnerRecord] = field(default_factory=dict)
    global_step: int = 0
    due: tuple[int, ...] = ()
    next_token: int = 1
    tokens_trained: int = 0
    tokens_pushed: int = 0
    tokens_merged: int = 0
    rounds_merged: int = 0
    rounds_abandoned: int = 0
    closing_until_s: float = 0.0
    held_back_until_s: float = 0.0
    averages: Averages = Averages()
    stepped_at_s: float | None = None
    evaluations: tuple[EvaluationRecord, ...] = ()
    stopping: bool = False
    held: str = ""
    evicted: Mapping[str, Eviction] = field(default_factory=dict)
    rollbacks: tuple[Rollback, ...] = ()

    def with_learner(self, record: LearnerRecord) -> RunState:
        """This state with one record put in or replaced."""
        return replace(self, learners={**self.learners, record.name: record})

    def with_fragment(self, index: int, fragment: FragmentState) -> RunState:
        """This state with one fragment replaced."""
        fragments = (*self.fragments[:index], fragment, *self.fragments[index + 1 :])
        return replace(self, fragments=fragments)

    @property
    def interval_steps(self) -> int:
        """H in force now."""
        return self.spec.interval_steps(self.tokens_trained)

    @property
    def live_learners(self) -> tuple[LearnerRecord, ...]:
        """Learners (not evaluators) that hold a lease, in name order."""
        return tuple(
            record
            for _, record in sorted(self.learners.items())
            if record.live and record.role is Role.LEARNER
        )

    @property
    def quorum_effective(self) -> int:
        """K_eff = min(K, live), at least 1."""
        return max(1, min(self.spec.quorum, len(self.live_learners)))

    @property
    def open_rounds(self) -> tuple[Round, ...]:
        """Rounds that are collecting or merging, by fragment."""
        return tuple(f.round for f in self.fragments if f.round is not None)


def new_state(spec: RunSpec, digests: Iterable[str], generation: int) -> RunState:
    """The state of a run at its birth: version 0 of every fragment, epoch 1."""
    fragments = tuple(FragmentState(digest=digest) for digest in digests)
    slots = SlotClock(next_slot=1, anchor_slot=0, anchor_step=0, interval=spec.interval_steps(0))
    return RunState(spec=spec, epoch=1, generation=generation, fragments=fragments, slots=slots)
