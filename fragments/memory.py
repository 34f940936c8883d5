"""Between arrays of jax and this machine's memory, without a copy where none is needed."""

from __future__ import annotations

import math

import jax
import numpy as np
from jaxtyping import Array, Float32

from fragments.compiled import compiled

_ALIGNMENT = 64
"""Bytes: an array that begins at such an address is taken over by jax without a copy."""


def is_in_memory(values: Array | np.ndarray) -> bool:
    """Whether a loop can go over the values where they are."""
    return isinstance(values, np.ndarray) or values.platform() == "cpu"


def empty(shape: tuple[int, ...], dtype: np.dtype | type[np.generic]) -> np.ndarray:
    """An array without values yet, which `on_device` will not copy."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


def on_device(values: np.ndarray) -> Array:
    """`values` as a jax array, which may be the same memory: nobody may write to it any more."""
    there: Array = jax.device_put(values, may_alias=True)
    return there


@compiled
def subtract(
    one: Float32[np.ndarray, " values"],
    two: Float32[np.ndarray, " values"],
    made: Float32[np.ndarray, " values"],
) -> None:
    """made = one - two."""
    for i in range(len(made)):
        made[i] = one[i] - two[i]
