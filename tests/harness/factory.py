"""The factory that `diloco run` is given in tests: a program that trains in milliseconds."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
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


class _Sized(TinyProgram):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self._width = width

    def init_params(self, seed: int) -> Any:
        params = super().init_params(seed)
        return params | {"w": params["w"][: self._width]}


def sized(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """The tiny program with a `width` of its own."""
    del data, seed
    return _Sized(**settings)


class _Greedy(TinyProgram):
    def batch(self, shard: Shard, cursor: int) -> Any:
        raise MemoryError


def greedy(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """The tiny program where there is no memory for a batch."""
    del data, seed
    return _Greedy(**settings)


class _Killed(TinyProgram):
    def batch(self, shard: Shard, cursor: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(shard, cursor)


def killed(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """The tiny program whose process the system kills."""
    del data, seed
    return _Killed(**settings)


class _Stuck(TinyProgram):
    def __init__(self, told: str) -> None:
        super().__init__()
        self._told = Path(told)

    def batch(self, shard: Shard, cursor: int) -> Any:
        self._told.write_text("")
        threading.Event().wait()
        return super().batch(shard, cursor)


def stuck(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """The tiny program that waits for its first batch for good; it opens the pipe `told` first."""
    del data, seed
    return _Stuck(**settings)


class _Ending(TinyProgram):
    def batch(self, shard: Shard, cursor: int) -> Any:
        if cursor >= 4:
            os._exit(7)
        return super().batch(shard, cursor)


def ending(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """The tiny program, which takes its process with it at the fifth batch."""
    del data, seed
    return _Ending(**settings)
