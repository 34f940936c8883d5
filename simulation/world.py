"""What the islands of a simulated run are like: speeds, links, and what befalls them.

Everything is in virtual seconds. A world says nothing of the run's settings (`RunSpec`) or of what
is trained (`Program`).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Returns = Literal["fresh", "moments", "kept"]
"""What a process that follows on one that died has of it."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Link(_Model):
    """The line between a learner and the outer server.

    A payload takes `upload_steps` nominal steps (`World.step_s`) where that is given, whatever its
    size, otherwise its bits over `up_mbit_s`; neither: no time. Payloads of one direction follow
    one another. `latency_s` is added to every message, one way.
    """

    up_mbit_s: Positive | None = None
    down_mbit_s: Positive | None = None
    upload_steps: NotNegative | None = None
    download_steps: NotNegative | None = None
    latency_s: NotNegative = 0.0

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Self:
        if self.up_mbit_s is not None and self.upload_steps is not None:
            raise ValueError("give up_mbit_s or upload_steps, not both")
        if self.down_mbit_s is not None and self.download_steps is not None:
            raise ValueError("give down_mbit_s or download_steps, not both")
        return self


class Moment(_Model):
    """A point of a run: virtual seconds, the global step, or the share of the budget trained."""

    s: NotNegative | None = None
    step: Annotated[int, Field(ge=0)] | None = None
    share: Share | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if sum(value is not None for value in (self.s, self.step, self.share)) != 1:
            raise ValueError("give exactly one of s, step and share")
        return self

    def reached(self, now_s: float, global_step: int, share: float) -> bool:
        """Is the run there?"""
        return (
            (self.s is not None and now_s >= self.s)
            or (self.step is not None and global_step >= self.step)
            or (self.share is not None and share >= self.share)
        )


class Befalls(_Model):
    """Something that befalls one learner, from `at` until `until` (None: for good).

    join: it is not there before `at`. death: its process is killed; it returns, if it does, as a
    new process that has its checkpoint ("kept"; see `World.checkpoint_steps`), of that the inner
    moments only ("moments"), or nothing ("fresh"). partition: its line is cut, it trains on. stall:
    it makes no step, its line stays.
    """

    learner: Annotated[int, Field(ge=0)]
    kind: Literal["join", "death", "partition", "stall"]
    at: Moment
    until: Moment | None = None
    returns: Returns = "fresh"

    @model_validator(mode="after")
    def _until_fits(self) -> Self:
        if self.kind == "join" and self.until is not None:
            raise ValueError("a join has no end")
        if self.kind in ("partition", "stall") and self.until is None:
            raise ValueError(f"a {self.kind} needs an end: until")
        for unit in ("s", "step", "share") if self.until is not None else ():
            begin, end = getattr(self.at, unit), getattr(self.until, unit)
            if begin is not None and end is not None and end <= begin:
                raise ValueError(f"until ({end} {unit}) is not after at ({begin} {unit})")
        return self


class World(_Model):
    """Learners on their hardware and lines; learner i is the i-th of `speeds`.

    A step of learner i takes step_s / speeds[i] seconds times exp(jitter·z - jitter²/2) with z
    standard normal, whose mean is 1: jitter alone neither slows nor hastens. `merge_s` is what a
    merge and an outer step take at the server. `links` overrides `link` by learner. Learners write
    a checkpoint at every `checkpoint_steps`-th step of theirs, which takes no time.
    """

    speeds: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=64)] = (1.0,) * 4
    step_s: Positive = 1.0
    jitter: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    seed: Annotated[int, Field(ge=0)] = 0
    link: Link = Link()
    links: dict[int, Link] = Field(default_factory=dict)
    merge_s: NotNegative = 0.0
    checkpoint_steps: Annotated[int, Field(gt=0)] = 1
    befalls: tuple[Befalls, ...] = ()

    @model_validator(mode="after")
    def _learners_exist(self) -> Self:
        named = [("links", index) for index in self.links]
        named += [("befalls", event.learner) for event in self.befalls]
        for key, index in named:
            if not 0 <= index < len(self.speeds):
                raise ValueError(f"{key}: there is no learner {index} of {len(self.speeds)}")
        return self

    @property
    def learners(self) -> int:
        """How many there are."""
        return len(self.speeds)

    def link_of(self, learner: int) -> Link:
        """The line of one learner."""
        return self.links.get(learner, self.link)

    @property
    def has_bandwidth(self) -> bool:
        """Does any line have one, so that bytes take time?"""
        lines = (self.link, *self.links.values())
        return any(line.up_mbit_s or line.down_mbit_s for line in lines)

    def mean_step_s(self, learner: int) -> float:
        """What a step of this learner takes on average, seconds."""
        return self.step_s / self.speeds[learner]


class StepTimes:
    """Seconds of each successive step of one learner; the same seed gives the same ones."""

    def __init__(self, world: World, learner: int, seed: int) -> None:
        self._mean_s = world.mean_step_s(learner)
        self._jitter = world.jitter
        self._generator = np.random.default_rng([seed, world.seed, learner])

    def next_s(self) -> float:
        """How long the next step takes."""
        if self._jitter == 0.0:
            return self._mean_s
        exponent = self._jitter * self._generator.standard_normal() - self._jitter**2 / 2
        return self._mean_s * float(np.exp(exponent))


def learner_name(index: int) -> str:
    """The name of the i-th learner; names sort as their numbers do."""
    return f"island-{index:02d}"
