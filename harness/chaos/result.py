"""What a chaos run came to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

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
    fates: dict[str, int] = Field(description="what became of the contributions on the tape")
    versions: int = Field(description="that were merged, and computed again by the referee")
    events: int = Field(description="on the tape")
    snapshots: int = Field(description="whose state was compared with the tape's")
    starts: int = Field(description="of servers, on the tape")
    epochs: int = Field(description="1: nothing was ever given up")
    leases_lapsed: int
    recovery_s: Spread = Field(description="from a kill of the server until it serves again")
    learner_recovery_s: Spread = Field(description="from a kill of a learner until it steps again")
    away: Away | None
    goodput: float = Field(description="merged steps over those that unharmed learners would make")
    uptime: float = Field(description="share of seconds with a step that was handed in")
    tokens_trained: int
    tokens_merged: int
    tokens_per_s: float
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
