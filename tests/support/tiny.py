"""A program small enough to train in milliseconds: linear regression on fixed Gaussian data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fragments.runspec import RunSpec
from learner.member import layout_of
from learner.program import Shard, StepResult

WIDTH = 8


class TinyProgram:
    """y = x w + b with plain SGD; the held-out loss is the distance to the true weights."""

    identity = "tiny"
    tokens_per_step = 16
    loss_unit = "squared distance"

    def __init__(self, learning_rate: float = 0.05) -> None:
        generator = np.random.default_rng(0)
        self._true = generator.normal(size=WIDTH).astype(np.float32)
        rate = jnp.float32(learning_rate)

        def loss_of(params: Any, batch: Any) -> jax.Array:
            x, y = batch
            guess = jnp.dot(x, params["w"]) + jnp.sum(params["b"])
            return jnp.mean(jnp.square(guess - y))

        def step(params: Any, inner: Any, batch: Any, progress: jax.Array) -> StepResult:
            del progress
            loss, gradient = jax.value_and_grad(loss_of)(params, batch)
            moved = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
            return StepResult(moved, inner + jnp.float32(1), loss)

        self._step = jax.jit(step)

    def init_params(self, seed: int) -> Any:
        key = jax.random.key(seed)
        return {"w": jax.random.normal(key, (WIDTH,), jnp.float32), "b": jnp.zeros(1, jnp.float32)}

    def init_inner(self, params: Any) -> Any:
        del params
        return jnp.float32(0)

    def averaged(self, path: str) -> bool:
        return "b" in path

    def batch(self, shard: Shard, cursor: int) -> Any:
        generator = np.random.default_rng([shard.index, cursor])
        x = generator.normal(size=(self.tokens_per_step, WIDTH)).astype(np.float32)
        return x, x @ self._true

    def step(self, params: Any, inner: Any, batch: Any, progress: jax.Array) -> StepResult:
        result: StepResult = self._step(params, inner, batch, progress)
        return result

    def evaluate(self, params: Any) -> float:
        return float(np.sum(np.square(np.asarray(params["w"]) - self._true)))


def tiny_spec(**settings: Any) -> RunSpec:
    """Settings of a small run over two fragments."""
    defaults: dict[str, Any] = {
        "run_id": "tiny",
        "fragments": 2,
        "sync_interval": 4,
        "budget_tokens": 6400,
        "codec": {"block": 8},
        "closing_lap_s": 5.0,
    }
    return RunSpec.model_validate(defaults | settings)


def tiny_birth(spec: RunSpec) -> tuple[Any, list[np.ndarray]]:
    """Layout and version 0 of a tiny run."""
    from fragments.tree import TreeCodec

    program = TinyProgram()
    params = program.init_params(spec.seed)
    layout = layout_of(program, params, spec)
    codec = TreeCodec(layout, params)
    values = [np.asarray(codec.pack(p, params)) for p in range(len(layout.fragments))]
    return layout, values
