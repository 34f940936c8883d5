"""A data-parallel job that dies and is started again: what is kept of its time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from harness.chaos.figures import uptime
from harness.chaos.result import Spread


@dataclass(frozen=True, slots=True)
class Life:
    """Of the job, from one kill to the next. Seconds since it first began to step.

    `number`: steps of the checkpoint that it went on from. `repaired_s`: when whoever was down was
    to be back. `let_go_s`: when it began to step; None where a kill or the end came first.
    `stamps`: when it had made its steps.
    """

    number: int
    began_s: float
    repaired_s: float
    let_go_s: float | None
    ended_s: float
    stamps: tuple[float, ...]


class JobResult(BaseModel):
    """What a data-parallel job came to under kills. Shares are of `span_s`, and sum to 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kills: int = Field(description="of its workers")
    starts: int = Field(description="of the job, the first one included")
    steps_useful: int = Field(description="that lead to where the job was at the end, each once")
    steps_made: int
    span_s: float = Field(description="from the first step to the end")
    goodput: float = Field(description="useful steps over those that it would make at its pace")
    uptime: float = Field(description="share of seconds with a step")
    down: float = Field(description="from a kill until whoever was down is repaired")
    returning: float = Field(description="from the repair to the beginning of the next step")
    made_again: float = Field(description="steps after the checkpoint that it went back to")
    slower: float = Field(description="the rest: steps that took longer than the pace")
    late_s: Spread = Field(
        description="starts whose processes were not ready when the restart was to be over: by how"
        " much"
    )


def next_step_s(downtimes: Sequence[tuple[float, float]], restart_s: float) -> float:
    """When a job goes on whose workers were killed at the first of each pair and are there again
    the second later: `restart_s` after the last of them is. 0 without any.
    """
    return max((at_s + down_s + restart_s for at_s, down_s in downtimes), default=0.0)


def job_result(
    lives: Sequence[Life], kills: int, pace_s: float, late_s: Sequence[float]
) -> JobResult:
    """Of a job whose lives follow each other without a gap, from 0 on."""
    span_s = lives[-1].ended_s
    stamps = [at_s for life in lives for at_s in life.stamps]
    useful = lives[-1].number + len(lives[-1].stamps)
    down_s = returning_s = 0.0
    for life in lives:
        stepped_s = life.ended_s if life.let_go_s is None else life.let_go_s
        repaired_s = min(max(life.began_s, life.repaired_s), stepped_s)
        down_s += repaired_s - life.began_s
        returning_s += stepped_s - repaired_s
    made_s, useful_s = len(stamps) * pace_s, useful * pace_s
    return JobResult(
        kills=kills,
        starts=len(lives),
        steps_useful=useful,
        steps_made=len(stamps),
        span_s=round(span_s, 1),
        goodput=round(useful_s / span_s, 4),
        uptime=round(uptime(stamps, (0.0, span_s), ()), 4),
        down=round(down_s / span_s, 4),
        returning=round(returning_s / span_s, 4),
        made_again=round((made_s - useful_s) / span_s, 4),
        slower=round((span_s - down_s - returning_s - made_s) / span_s, 4),
        late_s=Spread.of(late_s),
    )
