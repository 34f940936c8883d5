"""Digests of fragment values, taken where the value lives, and of a whole run's weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt32

# Odd, so that multiplying by them and by the odd position weights is a bijection of uint32.
_LINEAR_MULTIPLIER = 0x9E3779B1
_MIXED_MULTIPLIER = 0x85EBCA77


@jax.jit
def digest_blocks(blocks_BxN: Float32[Array, "B N"]) -> UInt32[Array, " 2"]:
    """Two position-weighted sums of a fragment value's bits, modulo 2^32.

    With x_i the bits of value i (row-major) and weights w_i = (2i+1)·constant:
    Σ x_i·w_i, and Σ mix(x_i·w'_i) with the finalizer of MurmurHash3 as mix. Both are bijective in
    each single value, so a change of one value always shows in both; other changes escape with a
    probability of about 2^-64 if they are accidents (it is no cryptographic hash). +0 adds
    nothing, so the number of padding rows does not matter. Integer sums do not depend on the
    order of summation: every device gets the same.
    """
    bits_BxN = jax.lax.bitcast_convert_type(blocks_BxN, jnp.uint32)
    sums: Array = jax.lax.platform_dependent(bits_BxN, cpu=_row_by_row, default=_all_at_once)
    return sums


def _all_at_once(bits_BxN: UInt32[Array, "B N"]) -> UInt32[Array, " 2"]:
    """The sums as the formula says, for devices with many threads."""
    row_BxN = jax.lax.broadcasted_iota(jnp.uint32, bits_BxN.shape, 0)
    column_BxN = jax.lax.broadcasted_iota(jnp.uint32, bits_BxN.shape, 1)
    position_BxN = row_BxN * jnp.uint32(bits_BxN.shape[1]) + column_BxN
    odd_BxN = position_BxN * jnp.uint32(2) + jnp.uint32(1)
    linear_BxN = bits_BxN * (odd_BxN * jnp.uint32(_LINEAR_MULTIPLIER))
    mixed_BxN = _murmur3_mix(bits_BxN * (odd_BxN * jnp.uint32(_MIXED_MULTIPLIER)))
    return jnp.stack([jnp.sum(linear_BxN, dtype=jnp.uint32), jnp.sum(mixed_BxN, dtype=jnp.uint32)])


def _row_by_row(bits_BxN: UInt32[Array, "B N"]) -> UInt32[Array, " 2"]:
    """The same sums at half the cost on a processor: what a row and a column add to a weight is
    computed once, constants are multiplied last, and a row stays in the first cache.
    """
    rows, width = bits_BxN.shape
    column_N = jnp.arange(width, dtype=jnp.uint32) * jnp.uint32(2)
    weight_N = (column_N + jnp.uint32(1)) * jnp.uint32(_MIXED_MULTIPLIER)
    first_B = jnp.arange(rows, dtype=jnp.uint32) * jnp.uint32(2 * width)

    def add_row(
        sums: tuple[Array, Array], row: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array], None]:
        bits_N, first = row
        linear = (first + jnp.uint32(1)) * jnp.sum(bits_N, dtype=jnp.uint32)
        linear += jnp.sum(bits_N * column_N, dtype=jnp.uint32)
        mixed_N = _murmur3_mix(bits_N * (weight_N + first * jnp.uint32(_MIXED_MULTIPLIER)))
        return (sums[0] + linear, sums[1] + jnp.sum(mixed_N, dtype=jnp.uint32)), None

    nothing = (jnp.uint32(0), jnp.uint32(0))
    (linear, mixed), _ = jax.lax.scan(add_row, nothing, (bits_BxN, first_B))
    return jnp.stack([linear * jnp.uint32(_LINEAR_MULTIPLIER), mixed])


def digest_hex(blocks_BxN: Float32[Array, "B N"] | Float32[np.ndarray, "B N"]) -> str:
    """`digest_blocks` as 16 hex digits. Waits for the device."""
    linear, mixed = (int(word) for word in np.asarray(digest_blocks(blocks_BxN)))
    return f"{linear:08x}{mixed:08x}"


def combine(fragments: Iterable[tuple[int, int, int, str]]) -> str:
    """The run's weights digest: sha256 (64 hex digits) over (epoch, p, v, hex) of each fragment.

    Independent of the order in which the fragments are given.
    """
    text = json.dumps(sorted(fragments, key=lambda entry: (entry[1], entry)), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _murmur3_mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The 32-bit finalizer of MurmurHash3 (Appleby): a bijection that maps 0 to 0."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    mixed: Array = x ^ (x >> jnp.uint32(16))
    return mixed
