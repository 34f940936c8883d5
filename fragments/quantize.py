"""The int8 quantizer of pseudo-gradients and outer updates, and the exact adding of an update.

One step per block (row): max(c·RMS, absmax/127), rounded to bfloat16. A step that is a fraction
of the RMS, not of the maximum, leaves few symbols in use, which is what an entropy coder needs;
absmax/127 only keeps the largest value within int8. A bfloat16 step has 8 significant bits and a
symbol 7, so their product is exact in float32 and base + update is rounded once: every device
gets the same bits, with or without fused multiply-add.

Shape letters: B rows (blocks), N values per row. Everything is jitted, once per shape.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32, UInt16, UInt32

from fragments.layout import FragmentLayout
from fragments.payload import MAX_STEP_BITS, MIN_STEP_BITS

MAX_CODE = 127

SMALLEST_NORMAL_BITS = 0x00800000
"""Bits of 2^-126."""

MAGNITUDE_MASK = 0x7FFFFFFF


Symbols = Int8[Array, "B N"] | Float32[Array, "B N"]
"""Of a quantized fragment: int8, or, where nothing is quantized, values at a step of 1."""


class Quantized(NamedTuple):
    """A fragment in symbols.

    `codes`: int8 (B, N) in [-127, 127] (or see `Symbols`). `step_bits`: the bits of each block's
    bfloat16 step, 0 for a zero block. `finite`: scalar on the device; False when a value was not
    finite or too large for a step of at most 2^100, and then the rest must not be used.
    """

    codes: Symbols
    step_bits: UInt16[Array, " B"]
    finite: Bool[Array, ""]


def valid_counts(fragment: FragmentLayout, rows_padded: int) -> Int32[np.ndarray, " B"]:
    """How many values of each row are not padding: int32 (rows_padded,), in [0, block]."""
    counts = np.zeros(rows_padded, np.int32)
    for slot in fragment.slots:
        if slot.size:
            counts[slot.row_start : slot.row_stop] = fragment.block
            full_rows = slot.row_stop - slot.row_start - 1
            counts[slot.row_stop - 1] = slot.size - full_rows * fragment.block
    return counts


@jax.jit
def quantize(
    x_BxN: Float32[Array, "B N"],
    valid_B: Int32[Array, " B"],
    c: Float[Array, ""] | float,
) -> Quantized:
    """Quantizes each row: codes = round_half_even(x / step), step as the module says.

    Args:
        x_BxN: float32; padding must be zero.
        valid_B: values per row over which the RMS is taken (see `valid_counts`).
        c: step as a fraction of the RMS, in [0, 2^20]; 0 for absmax/127. A c of .5 to 1 costs about
            3.1 to 2.1 bits a value after entropy coding.

    The error is at most step/2. A block whose step would be below 2^-100 becomes zero.
    """
    absmax_B = jnp.max(jnp.abs(x_BxN), axis=1)
    rms_B = _rms(x_BxN, absmax_B, valid_B)
    wanted_B = jnp.maximum(jnp.float32(c) * rms_B, absmax_B / jnp.float32(MAX_CODE))
    # Rounding down takes at most 2^-8 of the step, so no symbol passes 127·(1 + 2^-8) < 127.5.
    bits_B = nearest_bfloat16_bits(wanted_B)
    # Written so that a NaN, whose comparisons are all false, is not fine.
    fine_B = jnp.isfinite(absmax_B) & (bits_B <= jnp.uint16(MAX_STEP_BITS))
    bits_B = jnp.where(fine_B & (bits_B >= jnp.uint16(MIN_STEP_BITS)), bits_B, jnp.uint16(0))
    zero_B = bits_B == jnp.uint16(0)
    divisor_B = jnp.where(zero_B, jnp.float32(1), step_values(bits_B))
    scaled_BxN = jnp.where(zero_B[:, None], jnp.float32(0), x_BxN / divisor_B[:, None])
    return Quantized(jnp.round(scaled_BxN).astype(jnp.int8), bits_B, jnp.all(fine_B))


@jax.jit
def dequantize(codes_BxN: Symbols, step_bits_B: UInt16[Array, " B"]) -> Float32[Array, "B N"]:
    """Codes * step, exact in float32 for any step that `quantize` makes."""
    return codes_BxN.astype(jnp.float32) * step_values(step_bits_B)[:, None]


@jax.jit
def apply_update(
    base_BxN: Float32[Array, "B N"],
    codes_BxN: Symbols,
    step_bits_B: UInt16[Array, " B"],
) -> Float32[Array, "B N"]:
    """The next broadcast copy: base + codes * step, rounded once, `flush_subnormals`ed.

    The same bits on every device and in numpy. (A device that treats subnormals as zero agrees:
    the smallest update, 2^-100, is so far above them that a subnormal base never changes a sum,
    and a sum that cancels is a multiple of 2^-125.)
    """
    next_BxN: Array = flush_subnormals(base_BxN + dequantize(codes_BxN, step_bits_B))
    return next_BxN


@jax.jit
def flush_subnormals(x_BxN: Float32[Array, "B N"]) -> Float32[Array, "B N"]:
    """Values below 2^-126 in magnitude, and -0, become +0; all others keep their bits.

    What learners adopt has passed through this, because devices differ in how they treat
    subnormals.
    """
    bits_BxN = jax.lax.bitcast_convert_type(x_BxN, jnp.uint32)
    tiny_BxN = (bits_BxN & jnp.uint32(MAGNITUDE_MASK)) < jnp.uint32(SMALLEST_NORMAL_BITS)
    kept_BxN = jnp.where(tiny_BxN, jnp.uint32(0), bits_BxN)
    return jax.lax.bitcast_convert_type(kept_BxN, jnp.float32)


def step_values(step_bits_B: UInt16[Array, " B"]) -> Float32[Array, " B"]:
    """The steps as float32, from the bits of their bfloat16."""
    return jax.lax.bitcast_convert_type(
        step_bits_B.astype(jnp.uint32) << jnp.uint32(16), jnp.float32
    )


def step_values_in_memory(step_bits_B: UInt16[np.ndarray, " B"]) -> Float32[np.ndarray, " B"]:
    """`step_values` of an array in memory."""
    values_B: np.ndarray = (step_bits_B.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values_B


def _rms(
    x_BxN: Float32[Array, "B N"], absmax_B: Float32[Array, " B"], valid_B: Int32[Array, " B"]
) -> Float32[Array, " B"]:
    """Root mean square of each row's valid values, without overflow or underflow of squares.

    Rows are scaled by the power of two that brings their maximum to [1, 2), which is exact.
    """
    exponent_B = jax.lax.bitcast_convert_type(absmax_B, jnp.uint32) >> jnp.uint32(23)
    # 1 and 253: both 2^(e-127) and 2^(127-e) are normal numbers. What lies outside is zero or
    # refused anyway.
    exponent_B = jnp.clip(exponent_B, jnp.uint32(1), jnp.uint32(253))
    scale_B = _power_of_two(jnp.uint32(254) - exponent_B)
    squares_B = jnp.sum(jnp.square(x_BxN * scale_B[:, None]), axis=1)
    count_B = jnp.maximum(valid_B, jnp.int32(1)).astype(jnp.float32)
    return jnp.sqrt(squares_B / count_B) * _power_of_two(exponent_B)


def _power_of_two(biased_exponent_B: UInt32[Array, " B"]) -> Float32[Array, " B"]:
    return jax.lax.bitcast_convert_type(biased_exponent_B << jnp.uint32(23), jnp.float32)


def nearest_bfloat16_bits(x: Float32[Array, "*shape"]) -> UInt16[Array, "*shape"]:
    """Rounds positive float32 to bfloat16, nearest even, in integers.

    Not by astype: XLA may drop a conversion to bfloat16 and back ("excess precision").
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    even = (bits >> jnp.uint32(16)) & jnp.uint32(1)
    rounded: Array = (bits + jnp.uint32(0x7FFF) + even) >> jnp.uint32(16)
    return rounded.astype(jnp.uint16)
