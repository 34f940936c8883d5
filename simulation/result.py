"""What a simulated run says of itself, as plain data that is written as JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Model(BaseModel):
    # A diverged run's loss is no number, which JSON can only say as a text.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Point(_Model):
    """Held-out loss of the broadcast copy at a moment of the run."""

    tokens: int
    at_s: float
    loss: float


class LearnerResult(_Model):
    """One learner. `steps_lost`: trained, but gone before they were sent, with a death or when the
    learner came back from a partition and adopted newer versions. `holds_final`: at the end it
    holds the broadcast copy to the bit; None for one that has no process then.
    """

    name: str
    steps: int
    steps_lost: float
    deaths: int
    tokens_merged: int
    contributions_merged: int
    contributions_late: int
    contributions_refused: int
    holds_final: bool | None = None


class RunResult(_Model):
    """One run.

    `loss` is the held-out loss of the final broadcast copy in `loss_unit`; `digest` is that of
    these weights. Tokens are those of all learners. `virtual_s` is when the budget was trained,
    `finished_s` when the last version was out. `goodput` is useful learner-steps (completed until
    `virtual_s`, less those lost with a death or a partition) over those that the same hardware
    would have done in that time without waits, stalls and deaths.

    `bits_up` and `bits_down` are bits per parameter and synchronisation: payload bits over the
    parameters that they encode; full values to those who join are in `bytes_down` only.
    `tokens_pushed` and `tokens_merged` are means over the fragments. `merged_share` is the latter
    over `tokens_trained`: what is missing was trained while a new version was on its way, or lost.
    """

    policy: str
    loss: float
    loss_unit: str
    tokens_trained: int
    tokens_pushed: int
    tokens_merged: int
    merged_share: float
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
