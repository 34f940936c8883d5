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
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Float64, Int8, Int32, UInt16

from fragments.layout import FragmentLayout
from fragments.quantize import Symbols, dequantize, step_values

Encoded = tuple[Int8[np.ndarray, "B N"] | Float32[np.ndarray, "B N"], UInt16[np.ndarray, " B"]]
"""Symbols and step bits of one contribution, as `fragments.codec.Codec.decode` returns them."""


@dataclass(frozen=True, slots=True)
class Part:
    """One learner's share of a merge: its contributions, whose sum counts as one."""

    share: float
    encoded: tuple[Encoded, ...]


# Values near the largest float32 have no finite norm; what comes of them the outer step refuses.
@np.errstate(over="ignore", invalid="ignore")
def merge(
    parts: Iterable[Part], fragment: FragmentLayout, rows_padded: int, *, radial: bool
) -> Float32[Array, "B N"]:
    """The merged pseudo-gradient of a fragment, float32 (rows_padded, block).

    Parts are added in the order given: the same order gives the same bits.

    Args:
        parts: shares sum to 1. Taken one by one, so an iterator need hold only one.
        radial: RDA for tensors that are not declared averaged; otherwise the
            token-weighted average for all.
    """
    tensors = _Tensors(fragment, rows_padded, radial=radial)
    total_BxN = jnp.zeros((rows_padded, fragment.block), jnp.float32)
    mean_norm_T = np.zeros(len(fragment.slots))
    squared_shares = 0.0
    for part in parts:
        squared_shares += part.share**2
        norm_T = tensors.norms(part) if radial else mean_norm_T
        mean_norm_T = mean_norm_T + part.share * norm_T
        weight_B = tensors.rows(np.where(tensors.averaged_T, part.share, _over(part.share, norm_T)))
        for codes_BxN, step_bits_B in part.encoded:
            total_BxN = _add(total_BxN, weight_B, codes_BxN, step_bits_B)
    if not radial:
        return total_BxN
    direction_T = np.sqrt(tensors.sums(np.asarray(_row_squares(total_BxN), np.float64)))
    gain_T = np.minimum(_over(1.0, direction_T), math.sqrt(1.0 / squared_shares))
    scale_T = np.where(tensors.averaged_T, 1.0, mean_norm_T * gain_T)
    scaled_BxN: Array = _scale(total_BxN, tensors.rows(scale_T))
    return scaled_BxN


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
            one_step_B = np.asarray(step_values(jnp.asarray(one_bits_B)), np.float64)
            for two_BxN, two_bits_B in part.encoded:
                two_step_B = np.asarray(step_values(jnp.asarray(two_bits_B)), np.float64)
                products_B = np.asarray(_row_products(one_BxN, two_BxN), np.float64)
                squares_B += one_step_B * two_step_B * products_B
        # Rounding may leave a sum that cancels a hair below zero.
        norm_T: np.ndarray = np.sqrt(np.maximum(self.sums(squares_B), 0.0))
        return norm_T


def _over(numerator: float, denominator_T: Float64[np.ndarray, " T"]) -> Float64[np.ndarray, " T"]:
    """numerator / denominator, 0 where the denominator is 0 (phi(0) = 0)."""
    safe_T = np.where(denominator_T > 0.0, denominator_T, 1.0)
    quotient_T: np.ndarray = np.where(denominator_T > 0.0, numerator / safe_T, 0.0)
    return quotient_T


@partial(jax.jit, donate_argnums=0)
def _add(
    total_BxN: Float32[Array, "B N"],
    weight_B: Float32[Array, " B"],
    codes_BxN: Symbols,
    step_bits_B: UInt16[Array, " B"],
) -> Float32[Array, "B N"]:
    total: Array = total_BxN + weight_B[:, None] * dequantize(codes_BxN, step_bits_B)
    return total


@partial(jax.jit, donate_argnums=0)
def _scale(
    total_BxN: Float32[Array, "B N"], scale_B: Float32[Array, " B"]
) -> Float32[Array, "B N"]:
    return total_BxN * scale_B[:, None]


@jax.jit
def _row_squares(x_BxN: Float32[Array, "B N"]) -> Float32[Array, " B"]:
    return jnp.sum(jnp.square(x_BxN), axis=1)


@jax.jit
def _row_products(one_BxN: Symbols, two_BxN: Symbols) -> Int32[Array, " B"] | Float32[Array, " B"]:
    """Of int8 symbols exact: 127^2 times a block of at most 2^17 values is below 2^31."""
    if one_BxN.dtype == jnp.int8:
        product = one_BxN.astype(jnp.int32) * two_BxN.astype(jnp.int32)
        return jnp.sum(product, axis=1, dtype=jnp.int32)
    return jnp.sum(one_BxN * two_BxN, axis=1)
