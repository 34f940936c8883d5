"""Settings of the reference model, its data windows and its inner optimizer. Imports no jax."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class ReferenceSettings(BaseModel):
    """The defaults are the demo's: 382 thousand parameters; a step trains on 1,024 bytes.

    It takes about .045 s of one core, so three paced learners leave two cores half idle, and the
    loss still falls well below that of a bigram model in a thousand steps. `diloco run --preset
    demo` prints both.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: PositiveInt = 96
    """Size D of the residual stream."""
    depth: PositiveInt = 3
    """Number of blocks."""
    heads: PositiveInt = 3
    """Attention heads; must divide `width` into an even head size."""
    seq_len: PositiveInt = 64
    """Tokens (bytes) of context in training and evaluation."""
    batch_size: PositiveInt = 16
    """Windows in one inner step."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 5e-3
    """Peak inner learning rate."""
    warmup_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of the run's progress over which the learning rate rises linearly."""
    final_lr_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Learning rate at progress 1, as a share of the peak."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled decay (AdamW), on matrices only."""
    beta1: Share = 0.9
    beta2: Share = 0.95
    clip_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Bound on the gradient's global norm."""
    shards: Literal["interleaved", "contiguous"] = "interleaved"
    """Interleaved: every shard is a sample of the whole text. Contiguous: each is a stretch of it,
    which for files in the order of their names means directories of its own (not iid)."""
    eval_windows: PositiveInt = 256
    """Held-out windows in the fixed evaluation sample."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ReferenceSettings:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} must be a multiple of 2 x heads ({self.heads}): rotary "
                "position embedding needs an even head size"
            )
        return self
