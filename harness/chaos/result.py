"""What a chaos run came to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from harness.chaos.judgement import DataFound

LOSS_BOUND = 0.01
"""Largest share by which faults may raise the final held-out loss."""

PAUSE_BOUND = 0.5
"""A learner that makes no step for this share of the server's absence has stopped training."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Spread(_Record):
    """Of a sample."""

    median: float | None
    max: float | None
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Rounded to a hundredth; nothing of no values."""
        if not values:
            return Spread(median=None, max=None, count=0)
        median, most = round(statistics.median(values), 2), round(max(values), 2)
        return Spread(median=median, max=most, count=len(values))


class Away(_Record):
    """The server was away, and the learners went on."""

    seconds: float
    steps: dict[str, int] = Field(description="that each learner made meanwhile")
    longest_pause_s: float = Field(description="of any learner between two steps, meanwhile")


class Suffered(_Record):
    """An outage that came. Seconds since the begin of the run."""

    what: str
    whom: str
    began_s: float
    ended_s: float
    factor: float | None = None
    mbit: float | None = None


class KindFigures(_Record):
    """Of all outages of one kind."""

    count: int
    down_s: Spread = Field(description="from the outage to its repair")
    works_again_s: Spread = Field(
        description="from the outage to the next step of a learner after the repair; of the server,"
        " to its next answer"
    )
    counts_again_s: Spread = Field(
        description="from the outage to the next contribution of that learner that is acknowledged"
        " after the repair; of the server, of any"
    )


class Spent(_Record):
    """Where the learners' time went: shares that sum to 1."""

    merged: float = Field(description="steps that came into the weights: the goodput")
    down: float = Field(description="killed or stopped, until the repair")
    returning: float = Field(description="from the repair to the next step")
    slowed: float = Field(description="by an outage of that kind")
    unmerged: dict[str, float] = Field(description="steps that were not merged, by reason")
    slower: float = Field(description="the rest: steps that took longer than the pace")


class Models(_Record):
    """What others would keep under these outages: modelled, not measured."""

    restart_s: float = Field(
        description="from a repair to the next step: as it was set, or the learners' median"
    )
    checkpoint_s: float
    data_parallel: float = Field(description="goodput of one data-parallel job on all learners")
    papers_rule: float = Field(description="goodput if each learner lost its own time alone")


class ChaosResult(_Record):
    """Counts, figures and what the referee found. `holds`: no promise is broken."""

    seed: int
    server_kills: int = Field(description="kill -9 of the server, at random instants and at points")
    learner_kills: int
    learner_stops: int = Field(description="SIGSTOP beyond the lease, then SIGCONT")
    kills_by_point: dict[str, int]
    acknowledged: int = Field(description="contributions of which a learner has a receipt")
    acknowledged_lost: int
    applied_twice: int
    digest_mismatches: int
    voided: int = Field(description="acknowledged, and undone because an operator asked for it")
    data: DataFound
    fates: dict[str, int] = Field(description="what became of the contributions on the tape")
    versions: int = Field(description="that were merged, and computed again by the referee")
    events: int = Field(description="on the tape")
    snapshots: int = Field(description="whose state was compared with the tape's")
    starts: int = Field(description="of servers, on the tape")
    epochs: int = Field(description="1: nothing was ever given up")
    image: str | None = Field(
        default=None, description="of the containers that it ran in; null: processes of one machine"
    )
    learners: int
    pace_s: float
    mtbf_s: float | None = Field(description="of each unit; null for a schedule by hand or count")
    repair_s: float | None
    outages: tuple[Suffered, ...] = Field(description="those by the clock, as they came")
    unbegun: tuple[str, ...] = Field(
        default=(), description="of a script, whose moment never came: the run was over before"
    )
    by_kind: dict[str, KindFigures]
    spent: Spent | None = Field(description="null with faults by count, for which training is held")
    models: Models | None = Field(description="null without outages by the clock")
    late_s: Spread = Field(
        default=Spread(median=None, max=None, count=0),
        description="restarts that took longer than they were to take: by how much",
    )
    leases_lapsed: int
    recovery_s: Spread = Field(description="from a kill of the server until it serves again")
    learner_recovery_s: Spread = Field(description="from a kill of a learner until it steps again")
    away: Away | None
    goodput: float = Field(description="merged steps over those that unharmed learners would make")
    uptime: float = Field(description="share of seconds with a step that was handed in")
    tokens_trained: int
    tokens_merged: int
    tokens_per_s: float
    bytes_up: int = Field(description="from learners to the server, at their links")
    bytes_down: int
    loss_first: float
    loss: float = Field(description="held-out loss of the final weights")
    loss_unit: str
    loss_undisturbed: float | None = Field(description="of the same run without faults")
    loss_gap: float | None = Field(description="relative; below 0 where the faults did no harm")
    wall_s: float = Field(description="from the first step to the end of the run")
    held_s: float = Field(description="in which training waited for the schedule; left out of the"
                          " shares above")  # fmt: skip
    findings: tuple[str, ...] = Field(description="a sentence for each promise that is broken")
    holds: bool
