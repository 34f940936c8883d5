"""`fragments.quantize.quantize` as loops over arrays in this machine's memory.

The squares of a row are summed in LANES sums, in the order of the loop, so the bits are the same
on every processor. Those of XLA's sum, which another device computes, may differ in the last place,
and a step that is as near to two neighbours is the other one then; who receives it need not know.

Shape letters: B rows (blocks), N values per row.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int8, Int32, UInt16, UInt32

from fragments.compiled import compiled
from fragments.payload import MAX_STEP_BITS, MIN_STEP_BITS
from fragments.slabs import empty

LANES = 16
_MAGNITUDE_MASK = np.uint32(0x7FFFFFFF)
_INFINITY_BITS = 0x7F800000
_POWERS = (np.arange(256, dtype=np.uint32) << np.uint32(23)).view(np.float32)
"""2^(e - 127) at e, for e from 1 to 254."""


def quantize_in_memory(
    x_BxN: Float32[np.ndarray, "B N"], valid_B: Int32[np.ndarray, " B"], c: float
) -> tuple[Int8[np.ndarray, "B N"], UInt16[np.ndarray, " B"], bool]:
    """Arguments and results as those of `quantize`: codes, step bits, finite."""
    rows = len(x_BxN)
    absmax_bits_B, squares_B = np.empty(rows, np.uint32), np.empty(rows, np.float32)
    lanes = np.empty(LANES, np.float32)
    _measure(x_BxN, x_BxN.view(np.uint32), _POWERS, lanes, absmax_bits_B, squares_B)
    is_finite_B = absmax_bits_B < _INFINITY_BITS
    absmax_B = np.where(is_finite_B, absmax_bits_B.view(np.float32), np.float32(0))
    count_B = np.maximum(valid_B, 1).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # What is too large is not fine below.
        rms_B = np.sqrt(squares_B / count_B) * _POWERS[_exponents(absmax_bits_B)]
        wanted_B = np.maximum(np.float32(c) * rms_B, absmax_B / np.float32(127))
    bits_B = _nearest_bfloat16_bits(np.where(is_finite_B, wanted_B, np.float32(0)))
    is_fine_B = is_finite_B & (bits_B <= MAX_STEP_BITS)
    bits_B = np.where(is_fine_B & (bits_B >= MIN_STEP_BITS), bits_B, np.uint32(0))
    codes_BxN = empty(x_BxN.shape, np.int8)
    _divide(x_BxN, (bits_B << np.uint32(16)).view(np.float32), codes_BxN)
    return codes_BxN, bits_B.astype(np.uint16), bool(is_fine_B.all())


@compiled
def _measure(
    x_BxN: Float32[np.ndarray, "B N"],
    bits_BxN: UInt32[np.ndarray, "B N"],
    powers: Float32[np.ndarray, " 256"],
    lanes: Float32[np.ndarray, " lanes"],
    absmax_bits_B: UInt32[np.ndarray, " B"],
    squares_B: Float32[np.ndarray, " B"],
) -> None:
    """Of each row the bits of its largest magnitude, and the sum of the squares of its values,
    scaled by the power of two that brings that to [1, 2). The first two are the same memory.
    """
    width = x_BxN.shape[1]
    whole = width // LANES * LANES
    for i in range(len(x_BxN)):
        x_N, bits_N = x_BxN[i], bits_BxN[i]
        most = np.uint32(0)
        for j in range(width):
            most = max(most, np.uint32(bits_N[j] & _MAGNITUDE_MASK))
        exponent = min(max(most >> np.uint32(23), np.uint32(1)), np.uint32(253))
        scale = powers[np.uint32(254) - exponent]
        lanes[:] = np.float32(0)
        for start in range(0, whole, LANES):
            for k in range(LANES):
                scaled = x_N[start + k] * scale
                lanes[k] += scaled * scaled
        for j in range(whole, width):
            scaled = x_N[j] * scale
            lanes[j - whole] += scaled * scaled
        total = np.float32(0)
        for k in range(LANES):
            total += lanes[k]
        absmax_bits_B[i], squares_B[i] = most, total


@compiled
def _divide(
    x_BxN: Float32[np.ndarray, "B N"],
    step_B: Float32[np.ndarray, " B"],
    codes_BxN: Int8[np.ndarray, "B N"],
) -> None:
    """Each value by its row's step, to the nearest, halves to the even; zeros at a step of 0."""
    for i in range(len(x_BxN)):
        x_N, codes_N, step = x_BxN[i], codes_BxN[i], step_B[i]
        if step == np.float32(0):
            codes_N[:] = np.int8(0)
            continue
        for j in range(len(x_N)):
            codes_N[j] = np.int8(np.int32(np.rint(x_N[j] / step)))


def _exponents(bits_B: UInt32[np.ndarray, " B"]) -> UInt32[np.ndarray, " B"]:
    """Of float32 that are not negative, biased: so that 2^(e - 127) and its inverse are normal."""
    exponents_B: np.ndarray = np.clip(bits_B >> np.uint32(23), np.uint32(1), np.uint32(253))
    return exponents_B


def _nearest_bfloat16_bits(x_B: Float32[np.ndarray, " B"]) -> UInt32[np.ndarray, " B"]:
    """As `fragments.quantize.nearest_bfloat16_bits`."""
    bits_B = x_B.view(np.uint32)
    even_B = (bits_B >> np.uint32(16)) & np.uint32(1)
    rounded_B: np.ndarray = (bits_B + np.uint32(0x7FFF) + even_B) >> np.uint32(16)
    return rounded_B
