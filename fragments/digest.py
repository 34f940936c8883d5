"""Digests of fragment values, taken where the value lives, and of a whole run's weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt32

from fragments.compiled import compiled
from fragments.memory import is_in_memory

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
    row_BxN = jax.lax.broadcasted_iota(jnp.uint32, bits_BxN.shape, 0)
    column_BxN = jax.lax.broadcasted_iota(jnp.uint32, bits_BxN.shape, 1)
    position_BxN = row_BxN * jnp.uint32(bits_BxN.shape[1]) + column_BxN
    odd_BxN = position_BxN * jnp.uint32(2) + jnp.uint32(1)
    linear_BxN = bits_BxN * (odd_BxN * jnp.uint32(_LINEAR_MULTIPLIER))
    mixed_BxN = _murmur3_mix(bits_BxN * (odd_BxN * jnp.uint32(_MIXED_MULTIPLIER)))
    return jnp.stack([jnp.sum(linear_BxN, dtype=jnp.uint32), jnp.sum(mixed_BxN, dtype=jnp.uint32)])


def digest_hex(blocks_BxN: Float32[Array, "B N"] | Float32[np.ndarray, "B N"]) -> str:
    """`digest_blocks` as 16 hex digits, taken where the value lives. Waits for the device."""
    if is_in_memory(blocks_BxN):
        return words_hex(digest_in_memory(np.asarray(blocks_BxN).view(np.uint32)))
    return words_hex(np.asarray(digest_blocks(blocks_BxN)))


def words_hex(words: Iterable[int | np.uint32]) -> str:
    """The two sums as 16 hex digits."""
    linear, mixed = (int(word) for word in words)
    return f"{linear:08x}{mixed:08x}"


@compiled
def _murmur3_mix_one(x: np.uint32) -> np.uint32:
    """`_murmur3_mix` of one word."""
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ (x >> np.uint32(16)))


@compiled
def digest_in_memory(bits_BxN: UInt32[np.ndarray, "B N"]) -> tuple[np.uint32, np.uint32]:
    """The sums of `digest_blocks`, in a loop over the values' bits."""
    linear = mixed = np.uint32(0)
    for i in range(len(bits_BxN)):
        row_linear, row_mixed = digest_row(bits_BxN[i], i)
        linear, mixed = np.uint32(linear + row_linear), np.uint32(mixed + row_mixed)
    return linear, mixed


@compiled
def digest_row(bits_N: UInt32[np.ndarray, " N"], row: int) -> tuple[np.uint32, np.uint32]:
    """What the row of that number adds to the two sums."""
    width = len(bits_N)
    linear = mixed = np.uint32(0)
    for j in range(width):
        odd = np.uint32(2 * (row * width + j) + 1)
        linear = np.uint32(linear + np.uint32(bits_N[j] * odd))
        weighted = np.uint32(bits_N[j] * np.uint32(odd * np.uint32(_MIXED_MULTIPLIER)))
        mixed = np.uint32(mixed + _murmur3_mix_one(weighted))
    return np.uint32(linear * np.uint32(_LINEAR_MULTIPLIER)), mixed


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
