"""The frozen messages that rooms hand to one another.

They mirror the wire contract (`protos/diloco/v1`) without depending on it:
only `services.translate` knows both. Nothing here imports jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fragments.errors import RefusalCode as RefusalCode
from fragments.payload import Payload

PROTOCOL_VERSION = 1
"""Raised when an old and a new side could misunderstand each other."""


class Phase(StrEnum):
    """Phase of a run; see `diloco.v1.Phase`."""

    WAITING = "waiting"
    TRAINING = "training"
    CLOSING = "closing"
    FINISHED = "finished"
    DRAINING = "draining"


class Role(StrEnum):
    """Role of a joining process."""

    LEARNER = "learner"
    EVALUATOR = "evaluator"


class DeclineReason(StrEnum):
    """Why a learner answers an ask with nothing."""

    NO_STEPS = "no_steps"
    NOT_FINITE = "not_finite"
    CONSUMED = "consumed"
    NO_BASE = "no_base"


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A fragment's version: `number` rises with each round within an `epoch`."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to speak for a learner; `token` rises with every join of the name."""

    learner: str
    token: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class RunDescription:
    """All that a process needs to build the model and layout of a run.

    The caps are the server's own on its bulk traffic, Mbit/s, 0 for none.
    """

    run_id: str
    protocol_version: int
    run_spec_json: str
    layout_json: str
    layout_digest: str
    bulk_port: int
    bulk_host: str
    generation: int
    epoch: int
    phase: Phase
    cap_receive_mbit: float = 0.0
    cap_send_mbit: float = 0.0


@dataclass(frozen=True, slots=True)
class HeldBase:
    """A base that a joining learner still holds, and what it trained on it."""

    fragment: int
    version: Version
    steps_since: int
    tokens_since: int


@dataclass(frozen=True, slots=True)
class Hello:
    """A request to join. `bases` is empty for a newcomer."""

    protocol_version: int
    run_id: str
    layout_digest: str
    name: str
    role: Role
    incarnation: str
    bases: tuple[HeldBase, ...] = ()
    cursor: int = 0
    generation_seen: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `Hello`.

    `versions` and `consumed` are indexed by fragment; `consumed` is the base
    version already consumed for this learner, -1 for none. `cursor` counts
    batches of shard `shard_index` of `shard_count`.
    """

    lease: Lease
    generation: int
    epoch: int
    phase: Phase
    versions: tuple[int, ...]
    consumed: tuple[int, ...]
    shard_index: int
    shard_count: int
    cursor: int
    global_step: int
    tokens_trained: int
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """Where a learner is. `step` and `tokens` are cumulative since its process began.

    `cursor`: next batch of its shard. `wait_share` in [0, 1]; `step_s` in
    seconds; `loss` in nats per token, NaN if unknown. Caps and use of its bulk
    traffic in Mbit/s, 0 for no cap: its link fills them in. `outruns`: there
    was always a transfer waiting or under way in the last H steps. `paused`: it
    steps no further on what it holds (`AdoptionSettings.max_overlap_steps`).
    """

    step: int
    tokens: int
    cursor: int
    wait_share: float = 0.0
    step_s: float = 0.0
    loss: float = float("nan")
    cap_up_mbit: float = 0.0
    cap_down_mbit: float = 0.0
    use_up_mbit: float = 0.0
    use_down_mbit: float = 0.0
    outruns: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Send your pseudo-gradient of `fragment`; the round supersedes `version`."""

    fragment: int
    version: Version


@dataclass(frozen=True, slots=True)
class Decline:
    """Nothing from this learner in the round that supersedes `version`. `consumed_base`: with
    CONSUMED, the base that it has contributed on already, where that is said.
    """

    fragment: int
    version: Version
    reason: DeclineReason
    consumed_base: Version | None = None


@dataclass(frozen=True, slots=True)
class ContributionKey:
    """Identity of a contribution within a run: accepted once."""

    learner: str
    fragment: int
    base_version: Version


@dataclass(frozen=True, slots=True)
class Contribution:
    """One learner's encoded pseudo-gradient (base - local) of one fragment.

    `steps` and `tokens` count what was trained since the base was adopted;
    `[cursor_from, cursor_to)` are the batches of its shard in them. `base_digest`: of the base's
    values, 16 hex digits; "" where it is not said.
    """

    key: ContributionKey
    asked_version: Version
    steps: int
    tokens: int
    cursor_from: int
    cursor_to: int
    payload: Payload
    base_digest: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The server has the contribution. `late`: it waits for the next round."""

    key: ContributionKey
    duplicate: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """The server did not take it, for `code`; `reason` is a sentence for people."""

    code: RefusalCode
    reason: str


@dataclass(frozen=True, slots=True)
class Answered:
    """What has become of what an operator asked for, as a sentence; durable by then.

    `changed` False: it was so already. `snapshot`: the name of the one that was written or gone
    back to, "" where there is none.
    """

    sentence: str
    changed: bool = True
    snapshot: str = ""


@dataclass(frozen=True, slots=True)
class Published:
    """A new version of a fragment can be pulled."""

    fragment: int
    version: Version


@dataclass(frozen=True, slots=True)
class Progress:
    """The run's clock and phase, and what may change in mid-run: H (`sync_interval_steps`) as it is
    in force, and the budget; 0 where it is not told.
    """

    global_step: int
    tokens_trained: int
    phase: Phase
    sync_interval_steps: int = 0
    budget_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The stream ends, and why. `code` None: no fault, the server is stopping."""

    code: RefusalCode | None
    reason: str


ServerNote = Ask | Published | Progress | Goodbye
"""What the server says on a control stream."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """The learner trains on `version` since its step `at_step`, in its own counter."""

    fragment: int
    version: Version
    digest: str
    at_step: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Update:
    """One encoded step of a fragment's broadcast copy.

    `from_version` None: a full, exact value; otherwise an outer update
    relative to that version. `digest`: of the broadcast copy at `version`.
    """

    fragment: int
    version: Version
    from_version: Version | None
    digest: str
    payload: Payload


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out loss of global weights. `versions` is indexed by fragment."""

    loss: float
    unit: str
    global_step: int
    tokens_trained: int
    versions: tuple[int, ...]


class LearnerState(StrEnum):
    """What the status says of a learner."""

    JOINED = "joined"
    TRAINING = "training"
    LOST = "lost"
    LEFT = "left"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True)
class FragmentStatus:
    """One fragment in the status."""

    fragment: int
    version: int
    digest: str
    num_values: int
    open: bool
    asked: int
    answered: int


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """One learner in the status; see `diloco.v1.LearnerStatus`."""

    name: str
    state: LearnerState
    token: int
    position: int
    steps: int
    tokens: int
    cursor: int
    joins: int
    contributions_merged: int
    tokens_merged: int
    contributions_late: int
    contributions_refused: int
    staleness: int
    silent_s: float
    step_s: float
    wait_share: float
    loss: float
    bytes_up: int
    bytes_down: int
    weights_digest: str
    cap_up_mbit: float = 0.0
    cap_down_mbit: float = 0.0
    use_up_mbit: float = 0.0
    use_down_mbit: float = 0.0
    outruns: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationStatus:
    """One evaluation in the status; `at_s` counts from the server's start."""

    loss: float
    unit: str
    global_step: int
    tokens_trained: int
    at_s: float
    evaluator: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A snapshot of the run; see `diloco.v1.RunStatus`."""

    run_id: str
    phase: Phase
    phase_reason: str
    generation: int
    epoch: int
    global_step: int
    tokens_trained: int
    tokens_pushed: int
    tokens_merged: int
    tokens_budget: int
    rounds_merged: int
    rounds_abandoned: int
    uptime_s: float
    tokens_per_s: float
    bytes_up: int
    bytes_down: int
    sync_interval_steps: int
    weights_digest: str
    fragments: Sequence[FragmentStatus] = field(default=())
    learners: Sequence[LearnerStatus] = field(default=())
    evaluations: Sequence[EvaluationStatus] = field(default=())
    cap_receive_mbit: float = 0.0
    cap_send_mbit: float = 0.0
    use_receive_mbit: float = 0.0
    use_send_mbit: float = 0.0
    stalled: str = ""
