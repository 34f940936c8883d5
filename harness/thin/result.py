"""What a bench of thin links came to."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

LEAST_UTILISATION = 0.5
"""Of data-parallel training on the widest link: below it the comparison would be with a batch at
which nobody would train so."""

KEPT = 0.95
"""Decoupled keeps its utilisation where it has this share of what it has on the widest link."""

LEAST_RATIO = 20.0
"""The claim, in tokens a second."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataParallelPoint(_Record):
    """Data-parallel training at one rate."""

    rate_mbit: float
    steps: int = Field(description="measured, of each process")
    step_s: float = Field(description="mean, from the end of one exchange to the next")
    tokens_per_s: float = Field(description="of all processes together")
    utilisation: float = Field(description="the pace over the mean step")
    step_bytes: float = Field(description="that a site sent per step, mean")
    cores_busy: float = Field(description="share of this machine's processor time in use")


class DecoupledPoint(_Record):
    """Decoupled DiLoCo at one rate."""

    rate_mbit: float
    steps: int = Field(description="measured, mean over learners")
    step_s: float = Field(description="mean over learners and steps")
    tokens_per_s: float = Field(description="trained by all learners together")
    utilisation: float = Field(description="the pace over the mean step")
    on_schedule: float = Field(description="rounds merged over slots that fell due")
    merged_share: float = Field(
        description="of trained tokens; the rest are steps between an answer and the adoption of"
        " what came of it, which the new weights replace"
    )
    learner_mbit: float = Field(description="largest of a learner's, in its busier direction")
    server_mbit: float = Field(description="the server's, in its busier direction")
    cores_busy: float = Field(description="share of this machine's processor time in use")


class Claim(_Record):
    """What one link shows."""

    rate_mbit: float
    ratio: float = Field(description="tokens a second, Decoupled's over data-parallel's")
    ratio_merged: float = Field(description="the same, of Decoupled's only those merged")
    ratio_hidden: float = Field(
        description="the same, had data-parallel hidden its exchange behind computing (computed)"
    )
    kept: float = Field(description="Decoupled's utilisation over that on the widest link")
    utilisation_wide: float = Field(description="of data-parallel, on the widest link")


class ThinResult(_Record):
    """The curve of both, from the widest link to the thinnest, and what it shows."""

    learners: int
    parameters: int
    tokens_per_step: int = Field(description="of one learner")
    pace_s: float = Field(description="what a step takes on the hardware that is stood for")
    sync_interval_steps: int
    fragments: int
    delay_ms: float = Field(default=0.0, description="from any site to any other, one way")
    delayed_by: str = Field(default="", description="how the delay is made; empty without one")
    round_trip_ms: float | None = Field(
        default=None, description="measured between two sites before all else; null: it was not"
    )
    codec: str
    window_s: float
    data_parallel: tuple[DataParallelPoint, ...]
    decoupled: tuple[DecoupledPoint, ...]
    claim: Claim | None = Field(
        description="on the thinnest link at which Decoupled keeps its utilisation and its schedule"
    )
    holds: bool = Field(description="that claim, with the utilisations that it needs")


def claimed(
    parallel: Sequence[DataParallelPoint], decoupled: Sequence[DecoupledPoint], pace_s: float
) -> Claim | None:
    """What the curves show, from the widest link to the thinnest; None where Decoupled keeps its
    utilisation and its schedule on no link.
    """
    widest = decoupled[0]
    for dp, ours in reversed(list(zip(parallel, decoupled, strict=True))):
        if ours.utilisation >= KEPT * widest.utilisation and ours.on_schedule >= KEPT:
            ratio = ours.tokens_per_s / dp.tokens_per_s
            return Claim(
                rate_mbit=ours.rate_mbit,
                ratio=round(ratio, 2),
                ratio_merged=round(ours.merged_share * ratio, 2),
                ratio_hidden=round(ratio / hidden_gain(dp.step_s, pace_s), 2),
                kept=round(ours.utilisation / widest.utilisation, 4),
                utilisation_wide=parallel[0].utilisation,
            )
    return None


def holds(claim: Claim | None) -> bool:
    """Whether it is what is promised of thin links."""
    return (
        claim is not None
        and claim.ratio >= LEAST_RATIO
        and claim.utilisation_wide >= LEAST_UTILISATION
    )


def hidden_gain(step_s: float, pace_s: float) -> float:
    """By how much data-parallel would be faster if all of its exchange went on while it computes:
    a step then takes the longer of the two.
    """
    return step_s / max(pace_s, step_s - pace_s)


def mean_rate(stamps: Sequence[Sequence[float]], begin_s: float, end_s: float) -> float:
    """Steps a second of a process, mean over processes, from their stamps within a window.

    Raises:
        ValueError: for a process with fewer than two.
    """
    rates = []
    for one in stamps:
        inside = [at_s for at_s in one if begin_s <= at_s <= end_s]
        if len(inside) < 2:
            raise ValueError("too few steps in the window")
        rates.append((len(inside) - 1) / (inside[-1] - inside[0]))
    return sum(rates) / len(rates)
