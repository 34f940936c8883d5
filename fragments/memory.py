"""Between arrays of jax and this machine's memory, without a copy where none is needed."""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float32

from fragments.compiled import compiled

_Made = TypeVar("_Made")


def is_in_memory(values: Array | np.ndarray) -> bool:
    """Whether a loop can go over the values where they are."""
    return isinstance(values, np.ndarray) or values.platform() == "cpu"


def on_device(values: np.ndarray) -> Array:
    """`values` as a jax array on the default device. On a processor it is mostly the same memory,
    without a copy, so nobody may write to `values` while the array or a computation on it lives.
    """
    there: Array = jax.device_put(values, may_alias=True)
    return there


def computed(made: _Made) -> _Made:
    """What was dispatched to a device, once it is computed. From then on what it was computed of is
    not read any more, so that memory which `on_device` shared may go; no test can show that this is
    waited for, since a processor is seldom late.
    """
    ready: _Made = jax.block_until_ready(made)  # type: ignore[no-untyped-call]  # jax has no types for it
    return ready


@compiled
def subtract(
    one: Float32[np.ndarray, " values"],
    two: Float32[np.ndarray, " values"],
    made: Float32[np.ndarray, " values"],
) -> None:
    """made = one - two."""
    for i in range(len(made)):
        made[i] = one[i] - two[i]
