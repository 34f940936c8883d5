"""The merge of decoded pseudo-gradients. Shape letters: B rows, N values a row.

Token-weighted average for tensors that are declared averaged; radial-directional
averaging (RDA) for every other tensor:

    merged = (sum_i s_i |v_i|) * phi(sum_i s_i phi(v_i)),   phi(x) = x / |x|, phi(0) = 0

with shares s_i that sum to 1 (Decoupled DiLoCo, arXiv 2604.21428). Its norm does not
shrink as learners are added. The gain over the plain average of directions is
bounded by sqrt(n_eff), n_eff = 1 / sum s_i^2, which it has for orthogonal v_i, so that
a residual of cancelling directions is not blown up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Float64, Int8, UInt16

from fragments.compiled import compiled
from fragments.layout import FragmentLayout
from fragments.memory import on_device
from fragments.quantize import step_values_in_memory
from fragments.slabs import empty

Encoded = tuple[Int8[np.ndarray, "B N"] | Float32[np.ndarray, "B N"], UInt16[np.ndarray, " B"]]
"""Symbols and step bits of one contribution, as `fragments.codec.Codec.decode` returns them."""


_TOGETHER = 4
"""Participants decoded and added at once: a byte of each for each of the fragment's parameters."""

_ROWS_AT_ONCE = 16
"""A quarter of a MiB at the usual block."""


@dataclass(frozen=True, slots=True)
class Part:
    """One learner's share of a merge: its contributions, whose sum counts as one."""

    share: float
    encoded: tuple[Encoded, ...]


# Values near the largest float32 have no finite norm; what comes of them the outer step refuses.
@np.errstate(over="ignore", invalid="ignore")
def merge(
    parts: Iterable[Part], fragment: FragmentLayout, rows_padded: int, *, radial: bool
) -> Float32[np.ndarray, "B N"]:
    """The merged pseudo-gradient of a fragment, float32 (rows_padded, block), in memory of its own.

    Parts are added in the order given: the same order gives the same bits.

    Args:
        parts: shares sum to 1. Taken a few at a time, so an iterator need not hold all.
        radial: RDA for tensors that are not declared averaged; otherwise the
            token-weighted average for all.
    """
    tensors = _Tensors(fragment, rows_padded, radial=radial)
    total_BxN = empty((rows_padded, fragment.block), np.float32)
    mean_norm_T = np.zeros(len(fragment.slots))
    squared_shares = 0.0
    is_first = True
    waiting = iter(parts)
    while together := tuple(islice(waiting, _TOGETHER)):
        addends = []
        for part in together:
            squared_shares += part.share**2
            norm_T = tensors.norms(part) if radial else mean_norm_T
            mean_norm_T = mean_norm_T + part.share * norm_T
            weight_T = np.where(tensors.averaged_T, part.share, _over(part.share, norm_T))
            weight_B = tensors.rows(weight_T)
            for symbols_BxN, step_bits_B in part.encoded:
                addends.append((weight_B, symbols_BxN, step_values_in_memory(step_bits_B)))
        _accumulate(total_BxN, addends, is_first=is_first)
        is_first = False
    if radial:
        # Read to the end before the values are scaled in their place.
        squares_B = np.asarray(_row_squares(on_device(total_BxN)), np.float64)
        direction_T = np.sqrt(tensors.sums(squares_B))
        gain_T = np.minimum(_over(1.0, direction_T), math.sqrt(1.0 / squared_shares))
        scale_T = np.where(tensors.averaged_T, 1.0, mean_norm_T * gain_T)
        _scale(total_BxN, tensors.rows(scale_T))
    return total_BxN


_Addend = tuple[Float32[np.ndarray, " B"], np.ndarray, Float32[np.ndarray, " B"]]
"""Weights of rows, symbols, steps of rows."""


def _accumulate(
    total_BxN: Float32[np.ndarray, "B N"], addends: Sequence[_Addend], *, is_first: bool
) -> None:
    """Adds all of them, a few rows at a time, which stay in the cache; `is_first`: to zero."""
    for start in range(0, len(total_BxN), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        if is_first:
            total_BxN[rows] = 0
        for weight_B, symbols_BxN, step_B in addends:
            _add(total_BxN[rows], weight_B[rows], symbols_BxN[rows], step_B[rows])


class _Tensors:
    """Which rows belong to which tensor of a fragment (T: tensors)."""

    def __init__(self, fragment: FragmentLayout, rows_padded: int, *, radial: bool) -> None:
        self.averaged_T = np.array([slot.spec.averaged or not radial for slot in fragment.slots])
        self._slots = fragment.slots
        self._rows = rows_padded

    def sums(self, squares_B: Float64[np.ndarray, " B"]) -> Float64[np.ndarray, " T"]:
        """Per tensor the sum over its rows, in row order."""
        return np.array([squares_B[s.row_start : s.row_stop].sum() for s in self._slots])

    def rows(self, value_T: Float64[np.ndarray, " T"]) -> Float32[np.ndarray, " B"]:
        """Each tensor's value at each of its rows; 0 in padding."""
        value_B = np.zeros(self._rows, np.float32)
        for slot, value in zip(self._slots, value_T, strict=True):
            value_B[slot.row_start : slot.row_stop] = value
        return value_B

    def norms(self, part: Part) -> Float64[np.ndarray, " T"]:
        """Norm per tensor of the part's sum, from integers: |sum_k q_k s_k|^2 per row is
        sum_kl s_k s_l (sum q_k q_l).
        """
        squares_B = np.zeros(self._rows)
        for one_BxN, one_bits_B in part.encoded:
            one_step_B = step_values_in_memory(one_bits_B).astype(np.float64)
            for two_BxN, two_bits_B in part.encoded:
                two_step_B = step_values_in_memory(two_bits_B).astype(np.float64)
                products_B = _row_products(one_BxN, two_BxN)
                squares_B += one_step_B * two_step_B * products_B
        # Rounding may leave a sum that cancels a hair below zero.
        norm_T: np.ndarray = np.sqrt(np.maximum(self.sums(squares_B), 0.0))
        return norm_T


def _over(numerator: float, denominator_T: Float64[np.ndarray, " T"]) -> Float64[np.ndarray, " T"]:
    """numerator / denominator, 0 where the denominator is 0 (phi(0) = 0)."""
    safe_T = np.where(denominator_T > 0.0, denominator_T, 1.0)
    quotient_T: np.ndarray = np.where(denominator_T > 0.0, numerator / safe_T, 0.0)
    return quotient_T


@compiled
def _add(
    total_BxN: Float32[np.ndarray, "B N"],
    weight_B: Float32[np.ndarray, " B"],
    symbols_BxN: np.ndarray,
    step_B: Float32[np.ndarray, " B"],
) -> None:
    """total += weight * symbols * step, rounded as a fused multiply-add rounds (but for one case in
    about 2^29, where the sum in float64 was rounded to a tie), on every processor.
    """
    for i in range(len(total_BxN)):
        total_N, symbols_N = total_BxN[i], symbols_BxN[i]
        weight, step = np.float64(weight_B[i]), step_B[i]
        for j in range(len(total_N)):
            value = np.float64(np.float32(symbols_N[j]) * step)
            total_N[j] = np.float32(np.float64(total_N[j]) + weight * value)


@compiled
def _scale(total_BxN: Float32[np.ndarray, "B N"], scale_B: Float32[np.ndarray, " B"]) -> None:
    for i in range(len(total_BxN)):
        total_N = total_BxN[i]
        for j in range(len(total_N)):
            total_N[j] *= scale_B[i]


@jax.jit
def _row_squares(x_BxN: Float32[Array, "B N"]) -> Float32[Array, " B"]:
    return jnp.sum(jnp.square(x_BxN), axis=1)


def _row_products(one_BxN: np.ndarray, two_BxN: np.ndarray) -> Float64[np.ndarray, " B"]:
    """The dot product of each pair of rows; of int8 symbols exact."""
    products_B = np.empty(len(one_BxN), np.float64)
    multiply = _multiply_symbols if one_BxN.dtype == np.int8 else _multiply_values
    multiply(one_BxN, two_BxN, products_B)
    return products_B


@compiled
def _multiply_symbols(
    one_BxN: Int8[np.ndarray, "B N"],
    two_BxN: Int8[np.ndarray, "B N"],
    products_B: Float64[np.ndarray, " B"],
) -> None:
    """127^2 times a block of at most 2^17 values is below 2^31."""
    for i in range(len(products_B)):
        one_N, two_N, total = one_BxN[i], two_BxN[i], np.int32(0)
        for j in range(len(one_N)):
            total = np.int32(total + np.int32(one_N[j]) * np.int32(two_N[j]))
        products_B[i] = total


@compiled
def _multiply_values(
    one_BxN: Float32[np.ndarray, "B N"],
    two_BxN: Float32[np.ndarray, "B N"],
    products_B: Float64[np.ndarray, " B"],
) -> None:
    for i in range(len(products_B)):
        one_N, two_N, total = one_BxN[i], two_BxN[i], 0.0
        for j in range(len(one_N)):
            total += np.float64(one_N[j]) * np.float64(two_N[j])
        products_B[i] = total
