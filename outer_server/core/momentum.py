"""SGD with momentum on a fragment that is in this machine's memory, in one pass over it.

What `optax.sgd` computes, and the same bits: as a chain of array operations it goes through memory
three times as often, and into new pages each time. Shape letters: B rows, N values a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float32

from fragments.compiled import compiled
from fragments.memory import on_device
from fragments.runspec import OuterSettings
from fragments.slabs import empty

_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal


class Moved(NamedTuple):
    """The next master copy and momentum buffer."""

    master_BxN: Float32[Array, "B N"]
    momentum_BxN: Float32[Array, "B N"]


def move(
    master_BxN: Float32[Array, "B N"],
    momentum_BxN: Float32[Array, "B N"],
    broadcast_BxN: Float32[Array, "B N"],
    merged_BxN: Float32[np.ndarray, "B N"],
    settings: OuterSettings,
) -> Moved:
    """A step by the merged pseudo-gradient; formulas at `outer_optimizer`. The old values stay as
    they are; in place of the pseudo-gradient is then what the broadcast copy is behind the new
    master.
    """
    made = empty(master_BxN.shape, np.float32), empty(master_BxN.shape, np.float32)
    _move(
        np.asarray(master_BxN).reshape(-1),
        np.asarray(momentum_BxN).reshape(-1),
        np.asarray(broadcast_BxN).reshape(-1),
        merged_BxN.reshape(-1),
        np.float32(-settings.learning_rate),
        np.float32(settings.momentum),
        settings.nesterov,
        made[0].reshape(-1),
        made[1].reshape(-1),
    )
    return Moved(on_device(made[0]), on_device(made[1]))


@compiled
def _move(
    master: Float32[np.ndarray, " values"],
    momentum: Float32[np.ndarray, " values"],
    broadcast: Float32[np.ndarray, " values"],
    merged: Float32[np.ndarray, " values"],
    minus_eta: np.float32,
    mu: np.float32,
    is_nesterov: bool,
    made_master: Float32[np.ndarray, " values"],
    made_momentum: Float32[np.ndarray, " values"],
) -> None:
    for i in range(len(master)):
        pushed = _flushed(merged[i])
        moved = _flushed(pushed + _flushed(mu * _flushed(momentum[i])))
        made_momentum[i] = moved
        direction = _flushed(pushed + _flushed(mu * moved)) if is_nesterov else moved
        there = _flushed(_flushed(master[i]) + _flushed(minus_eta * direction))
        made_master[i] = there
        merged[i] = there - broadcast[i]


@compiled
def _flushed(value: np.float32) -> np.float32:
    """As XLA's code on a processor takes and gives them: numbers that are too small to be normal,
    such as a momentum that nothing feeds any more comes to, are zeros of their sign.
    """
    return value * np.float32(0) if abs(value) < _SMALLEST_NORMAL else value
