"""The token-weighted merge of decoded pseudo-gradients. Shape letters: B rows, N values a row."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int8, UInt16

from fragments.quantize import dequantize

Encoded = tuple[Int8[np.ndarray, "B N"], UInt16[np.ndarray, " B"]]
"""Codes and step bits of one contribution, as `fragments.payload.decode_int8` returns them."""


def weighted_average(
    parts: Iterable[tuple[float, Encoded]], shape: tuple[int, int]
) -> Float32[Array, "B N"]:
    """Sum of share * pseudo-gradient over `parts`, float32 of `shape`.

    Shares are those of `core.weights` and sum to 1; one learner's late and
    fresh contributions carry the same share, so their sum counts as one
    pseudo-gradient. Parts are added in the order given: the same order gives the
    same bits. One part is decoded at a time.
    """
    merged_BxN = jnp.zeros(shape, jnp.float32)
    for share, (codes_BxN, step_bits_B) in parts:
        merged_BxN = _add(merged_BxN, jnp.float32(share), codes_BxN, step_bits_B)
    return merged_BxN


@jax.jit
def _add(
    total_BxN: Float32[Array, "B N"],
    share: Float32[Array, ""],
    codes_BxN: Int8[Array, "B N"],
    step_bits_B: UInt16[Array, " B"],
) -> Float32[Array, "B N"]:
    total: Array = total_BxN + share * dequantize(codes_BxN, step_bits_B)
    return total
