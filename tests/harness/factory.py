"""The factory that `diloco run` is given in tests: a program that trains in milliseconds."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from learner.program import Shard
from tests.support.tiny import TinyProgram


class _WithBigram(TinyProgram):
    def bigram_loss(self) -> float:
        """Stands for a baseline that is computed without training."""
        return 1.0


def build(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """The tiny program; `learning_rate` is its only setting."""
    del data, seed
    return _WithBigram(**settings)


class _Halved(TinyProgram):
    def gradient(self, params: Any, batch: Any) -> tuple[jax.Array, Any]:
        x, y = batch

        def loss_of(params: Any) -> jax.Array:
            return jnp.mean(jnp.square(x @ params["w"] + jnp.sum(params["b"]) - y))

        loss, slope = jax.value_and_grad(loss_of)(params)
        return loss, slope

    def updated(self, params: Any, inner: Any, gradient: Any, progress: Any) -> tuple[Any, Any]:
        rate = 0.05 * (1 - progress)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradient), inner


def halved(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """The tiny program whose step comes in two halves, and whose rate falls with progress."""
    del settings, data, seed
    return _Halved()


class _Ending(TinyProgram):
    def batch(self, shard: Shard, cursor: int) -> Any:
        if cursor >= 4:
            os._exit(7)
        return super().batch(shard, cursor)


def ending(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """The tiny program, which takes its process with it at the fifth batch."""
    del data, seed
    return _Ending(**settings)
