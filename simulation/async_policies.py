"""Outer optimizers for contributions that are applied alone, one after another, as they arrive.

They are optax transformations, so that a run names them as it names any other (`outer.factory`).
`async_server` is what applies them; the production server always merges rounds. The pseudo-gradient
of the n-th arrival is g; every transformation returns what is to be added to the parameters.

The naive policy is no transformation of its own: it is Nesterov SGD on every arrival.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32


class DelayedState(NamedTuple):
    """`sum_g` is what arrived since the last momentum step, `momentum` the buffer m, `arrivals` how
    many arrived in all.
    """

    sum_g: Float32[Array, "B N"]
    momentum: Float32[Array, "B N"]
    arrivals: Int32[Array, ""]


def delayed_nesterov(
    learning_rate: float, momentum: float = 0.8, every: int = 4, c: float = 0.0
) -> optax.GradientTransformation:
    """Delayed Nesterov (Async Local-SGD, arXiv 2401.09135, algorithm 3).

    Every arrival: D <- D + g. Every `every`-th (N) one: m <- beta m + D / N, then
    theta <- theta - eps ((1 - cN + c) beta m + g / N), D <- 0. All others:
    theta <- theta - eps (c beta m + g / N). eps: `learning_rate`, beta: `momentum`.
    """

    def init(params: Any) -> DelayedState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return DelayedState(zeros, zeros, jnp.int32(0))

    def update(g: Any, state: DelayedState, params: Any = None) -> tuple[Any, DelayedState]:
        del params
        arrivals = state.arrivals + jnp.int32(1)
        is_nth = arrivals % jnp.int32(every) == jnp.int32(0)
        sum_g = state.sum_g + g
        stepped = jnp.float32(momentum) * state.momentum + sum_g / jnp.float32(every)
        buffer = jnp.where(is_nth, stepped, state.momentum)
        share = jnp.where(is_nth, jnp.float32(1 - c * every + c), jnp.float32(c))
        change = share * jnp.float32(momentum) * buffer + g / jnp.float32(every)
        sum_g = jnp.where(is_nth, jnp.zeros_like(sum_g), sum_g)
        return -jnp.float32(learning_rate) * change, DelayedState(sum_g, buffer, arrivals)

    return optax.GradientTransformation(init, update)


class FractionalState(NamedTuple):
    """`share` is f of the next arrival, written by who applies it; `momentum` the buffer b."""

    share: Float32[Array, ""]
    momentum: Float32[Array, "B N"]


def fractional_momentum(
    learning_rate: float, momentum: float = 0.8
) -> optax.GradientTransformation:
    """A push counts as the share f of a whole round that its tokens are.

    b <- mu^f b + f g; theta <- theta - eta f (g + mu b), where f = tokens / (M H tokens per step).
    f = 1 is Nesterov SGD on a merged round; M pushes of f = 1/M decay the buffer as one round does.
    """

    def init(params: Any) -> FractionalState:
        return FractionalState(jnp.float32(1), jax.tree.map(jnp.zeros_like, params))

    def update(g: Any, state: FractionalState, params: Any = None) -> tuple[Any, FractionalState]:
        del params
        f, mu = state.share, jnp.float32(momentum)
        buffer = mu**f * state.momentum + f * g
        change = -jnp.float32(learning_rate) * f * (g + mu * buffer)
        return change, FractionalState(f, buffer)

    return optax.GradientTransformation(init, update)
