"""The settings of a run: written once by `diloco init`, owned by the server.

Learners are told them at joining; on a learner they are an error. Process
settings (paths, ports, caps, threads) are not here: each process has its own.
Nothing here imports jax.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

RUN_SPEC_VERSION = 1
"""Version of this document; a reader refuses a newer one."""

LARGEST_INT = (1 << 31) - 1
LARGEST_BUDGET = 1 << 62
"""Sums of tokens end here: beyond it they would not fit the wire."""

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INT)]
NaturalInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


CodecKind = Literal["int8", "absmax", "bf16", "f32"]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class IntervalStage(_Settings):
    """From `from_share` of the token budget on, H is `steps`."""

    from_share: Share
    steps: PositiveInt


class CodecSettings(_Settings):
    """The wire codec. Step of a block = max(c * RMS, absmax / 127); see `fragments.codec`."""

    kind: CodecKind = Field(
        default="int8", description="int8; or, to compare with, absmax/127 steps, bf16 or f32"
    )

    step_fraction_up: float = Field(default=1.0, gt=0, description="c of pseudo-gradients")
    step_fraction_down: float = Field(default=1.0, gt=0, description="c of outer updates")
    block: PositiveInt = Field(default=4096, description="values that share one step size")
    zstd_level: int = Field(default=1, ge=1, le=19, description="zstd level of payloads")


class OuterSettings(_Settings):
    """The outer optimizer: `optax.sgd`, or any optax transformation by name.

    With `factory` "module:function" (such as "optax:adam") the transformation is
    function(learning_rate, **settings), and the momentum settings are not used.
    """

    learning_rate: float = Field(default=0.5, gt=0, description="eta of the outer step")
    momentum: float = Field(default=0.8, ge=0, lt=1, description="mu of the outer step")
    nesterov: bool = Field(default=True, description="Nesterov momentum rather than plain")
    factory: str = Field(
        default="",
        pattern=r"^([\w.]+:\w+)?$",
        description="another optax transformation, as module:function",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="keywords of that transformation"
    )


class ClosingSettings(_Settings):
    """When a round with K answers stops waiting for those that are missing.

    "learned": each missing learner's own smoothed answer time decides.
    "paper": a grace window g after the K-th answer, 0 <= g <= gamma * (tau *
    step time - (time to quorum + time to merge and send)), moving averages
    (Decoupled DiLoCo, section 3). gamma 0 closes at the K-th answer.
    """

    rule: Literal["learned", "paper"] = Field(default="learned", description="learned or paper")
    gamma: float = Field(default=0.8, ge=0, le=1, description="gamma of the paper's rule")
    tau_steps: NaturalInt = Field(default=2, description="tau of the paper's rule, inner steps")


class AdoptionSettings(_Settings):
    """How a learner takes a new version of a fragment, at a step boundary.

    "overwrite": local <- new (Decoupled DiLoCo). "alpha": local <- alpha * local +
    (1 - alpha) * new (Streaming DiLoCo, arXiv 2501.18512). "rebase": local <- new +
    what was trained since the learner's last answer for this fragment.
    """

    mode: Literal["overwrite", "alpha", "rebase"] = Field(
        default="overwrite", description="overwrite, alpha or rebase"
    )
    alpha: float = Field(default=0.5, ge=0, lt=1, description="local share of mode alpha")
    max_overlap_steps: int | None = Field(
        default=None,
        ge=0,
        description="a learner pauses after H plus this many steps on one base; unset: never",
    )


class ProgramSettings(_Settings):
    """What is trained: a factory `module:function` and its own settings."""

    factory: str = Field(
        default="learner.reference.program:build",
        pattern=r"^[\w.]+:\w+$",
        description="module:function that returns the program (model, data, inner step)",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="settings of the factory's own, such as width=128"
    )
    identity: str = Field(default="", description="model and tokenizer identity, set by init")
    data_digest: str = Field(default="", description="digest of the data's manifest, set by init")


class RunSpec(_Settings):
    """All settings of one run.

    Symbols as in the paper: P `fragments`, H `sync_interval`, K `quorum`.
    """

    spec_version: int = RUN_SPEC_VERSION
    run_id: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]{0,64}$", description="set by init")
    seed: int = Field(
        default=0, ge=0, description="seed of the initial weights and of the data order"
    )
    budget_tokens: int = Field(
        default=1_000_000,
        gt=0,
        le=LARGEST_BUDGET,
        description="trained tokens of all learners at which the run ends",
    )
    fragments: PositiveInt = Field(default=4, description="P: number of fragments")
    sync_interval: tuple[IntervalStage, ...] = Field(
        default=(IntervalStage(from_share=0.0, steps=24),),
        description='H over the run, as "steps" or "share:steps,share:steps"',
    )
    quorum: PositiveInt = Field(default=1, description="K: answers that a round needs to close")
    min_learners: PositiveInt = Field(
        default=1, description="below this many live learners none opens"
    )
    max_learners: PositiveInt = Field(default=16, description="joins beyond this are refused")
    max_open_rounds: PositiveInt = Field(default=8, description="rounds open at once")
    staleness_bound: NaturalInt = Field(
        default=4, description="versions a contribution may be behind"
    )
    weight_bound: float = Field(
        default=2.0, ge=1, description="largest weight over the round's median"
    )
    lease_ttl_s: float = Field(
        default=15.0, gt=0, description="silence after which a learner is lost"
    )
    closing_lap_s: float = Field(
        default=20.0, gt=0, description="bound on the last lap at the budget"
    )
    closing_lap: Literal["mean", "step"] = Field(
        default="mean",
        description="the last lap takes the mean of what learners hold, or makes outer steps",
    )
    merge: Literal["rda", "average"] = Field(
        default="rda", description="radial-directional or plain average of pseudo-gradients"
    )
    asked: Literal["all", "reached"] = Field(
        default="all", description="whom a round asks: all, or who has reached its slot"
    )
    inner_warmup_steps: NaturalInt = Field(
        default=20,
        description="shortened first steps of a learner that begins or returns in mid-run",
    )
    late: Literal["join", "drop"] = Field(
        default="join", description="late contributions join the next round or are dropped"
    )
    closing: ClosingSettings = ClosingSettings()
    adoption: AdoptionSettings = AdoptionSettings()
    codec: CodecSettings = CodecSettings()
    outer: OuterSettings = OuterSettings()
    program: ProgramSettings = ProgramSettings()

    @field_validator("sync_interval", mode="before")
    @classmethod
    def _parse_interval(cls, value: object) -> object:
        """Accept 24, "24" and "0:4,0.25:24" beside a list of stages."""
        if isinstance(value, int):
            return ({"from_share": 0.0, "steps": value},)
        if not isinstance(value, str):
            return value
        stages = []
        for part in value.split(","):
            share, colon, steps = part.strip().rpartition(":")
            stages.append({"from_share": share if colon else 0.0, "steps": steps})
        return tuple(stages)

    @model_validator(mode="after")
    def _check(self) -> RunSpec:
        shares = [stage.from_share for stage in self.sync_interval]
        if not shares or shares[0] != 0.0 or shares != sorted(set(shares)):
            raise ValueError("sync_interval: stages must begin at share 0 and rise")
        if self.min_learners > self.max_learners:
            raise ValueError("min_learners is above max_learners")
        if self.quorum > self.max_learners:
            raise ValueError("quorum is above max_learners: no round could ever close")
        if self.spec_version > RUN_SPEC_VERSION:
            raise ValueError(
                f"this run was written by a newer version (spec {self.spec_version}, "
                f"known up to {RUN_SPEC_VERSION}): update this program"
            )
        return self

    def interval_steps(self, tokens_trained: int) -> int:
        """H in force once `tokens_trained` tokens were trained by all learners."""
        share = tokens_trained / self.budget_tokens
        steps = self.sync_interval[0].steps
        for stage in self.sync_interval:
            if share >= stage.from_share:
                steps = stage.steps
        return steps
