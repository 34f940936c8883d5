"""What a simulated run says of itself, as plain data that is written as JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Point(_Model):
    """Held-out loss of the broadcast copy at a moment of the run."""

    tokens: int
    at_s: float
    loss: float


class LearnerResult(_Model):
    """One learner. `steps_lost`: trained, but gone with a death before they were sent."""

    name: str
    steps: int
    steps_lost: float
    deaths: int
    tokens_merged: int
    contributions_merged: int
    contributions_late: int
    contributions_refused: int


class RunResult(_Model):
    """One run.

    `loss` is the held-out loss of the final broadcast copy in `loss_unit`; `digest` is that of
    these weights. Tokens are those of all learners. `virtual_s` is when the budget was trained,
    `finished_s` when the last version was out. `goodput` is useful learner-steps (completed until
    `virtual_s`, less those lost with a death) over those that the same hardware would have done
    in that time without waits, stalls and deaths. `bits_up` and `bits_down` are bits per parameter
    and synchronisation: payload bits over the parameters that they encode; full values to those
    who join are in `bytes_down` only.
    """

    policy: str
    loss: float
    loss_unit: str
    tokens_trained: int
    tokens_pushed: int
    tokens_merged: int
    rounds_merged: int
    rounds_abandoned: int
    virtual_s: float
    finished_s: float
    goodput: float
    bytes_up: int
    bytes_down: int
    bits_up: float | None
    bits_down: float | None
    digest: str
    curve: tuple[Point, ...]
    learners: tuple[LearnerResult, ...]
