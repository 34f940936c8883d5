"""A program whose step costs nothing, so that what a run of it costs is synchronisation.

Every step replaces all parameters by arrays of a small pool of normally distributed values, without
computing anything: the base that a learner adopted is a sum of such arrays, so the pseudo-gradient
base - local is normally distributed too, value by value independent, as those of training nearly
are. No two learners take the same array at the same step.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int64
from pydantic import BaseModel, ConfigDict, Field

from learner.program import Shard, StepResult

FACTORY = "harness.wire.program:build"

_POOL = 7
"""Arrays in the pool: a prime, so that steps and learners go through all of them."""

_SCALE = 0.02

_FIRST_STEPS = 3
_FIRST_STEP_S = 0.4
"""The first steps take a while: the server counts a learner's steps from the first report on, and a
learner that was many steps ahead of that would pause before its fragments are due."""


class PoolSettings(BaseModel):
    """The model's size."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensors: int = Field(ge=1, description="tensors of equal size")
    values: int = Field(ge=1, description="values of each")


class PoolProgram:
    """A `Program` of `tensors` float32 tensors of `values` values. It holds only the pool."""

    tokens_per_step = 1
    loss_unit = "nothing"

    def __init__(self, settings: PoolSettings, seed: int) -> None:
        self.identity = f"pool-1 tensors={settings.tensors} values={settings.values}"
        self._tensors = settings.tensors
        draw = np.random.default_rng(seed)
        self._pool = [
            jnp.asarray(_SCALE * draw.standard_normal(settings.values, np.float32))
            for _ in range(_POOL)
        ]
        self._loss = jnp.float32(0)

    def init_params(self, seed: int) -> dict[str, Float32[Array, " values"]]:
        """Zero, which no step returns to."""
        nothing = jnp.zeros_like(self._pool[0])
        return dict.fromkeys(self._params(0), nothing)

    def init_inner(self, params: object) -> tuple[()]:
        """None."""
        return ()

    def averaged(self, path: str) -> bool:
        """No tensor is: all are merged by direction, which costs more."""
        return False

    def batch(self, shard: Shard, cursor: int) -> Int64[np.ndarray, " 2"]:
        """Which step of which learner it is."""
        return np.array([cursor, shard.index])

    def step(
        self, params: object, inner: tuple[()], batch: Int64[np.ndarray, " 2"], progress: jax.Array
    ) -> StepResult:
        """Other parameters, which hold no memory of their own."""
        cursor, learner = (int(word) for word in batch)
        if cursor < _FIRST_STEPS:
            time.sleep(_FIRST_STEP_S)
        return StepResult(self._params(cursor + 2 * learner), inner, self._loss)

    def evaluate(self, params: object) -> float:
        """Nothing is learned."""
        return 0.0

    def _params(self, shift: int) -> dict[str, Float32[Array, " values"]]:
        return {f"t{i:04d}": self._pool[(i + shift) % _POOL] for i in range(self._tensors)}


def build(settings: dict[str, Any], data: str | None, seed: int) -> PoolProgram:
    """The program from a run's settings; it has no data.

    Raises:
        pydantic.ValidationError: for an unknown or ill-typed setting.
    """
    return PoolProgram(PoolSettings.model_validate(settings), seed)
