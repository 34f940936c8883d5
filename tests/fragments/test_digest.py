"""Digests: every change shows, padding does not, numpy agrees."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fragments.digest import combine, digest_blocks, digest_hex, words_hex

BITS = hnp.arrays(np.uint32, (3, 8), elements=st.integers(0, 2**32 - 1))


def reference(bits: np.ndarray) -> list[int]:
    """The two sums in plain integers."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    values = [int(x) for x in bits.reshape(-1)]
    linear = sum(x * (2 * i + 1) * 0x9E3779B1 for i, x in enumerate(values))
    mixed = sum(mix(x * (2 * i + 1) * 0x85EBCA77 % 2**32) for i, x in enumerate(values))
    return [linear % 2**32, mixed % 2**32]


def digest_of(bits: np.ndarray) -> list[int]:
    """On a device, which what lives in memory must agree with."""
    blocks = jnp.asarray(bits).view(jnp.float32)
    words = [int(word) for word in digest_blocks(blocks)]
    assert digest_hex(blocks) == words_hex(words)
    return words


@given(BITS)
def test_equals_the_reference_for_all_bit_patterns(bits: np.ndarray) -> None:
    """NaNs, subnormals and -0 included: only bits count."""
    assert digest_of(bits) == reference(bits)


@given(BITS, st.integers(0, 23), st.integers(0, 31))
def test_any_flipped_bit_shows_in_both_sums(bits: np.ndarray, place: int, bit: int) -> None:
    flipped = bits.copy()
    flipped.reshape(-1)[place] ^= np.uint32(1 << bit)
    before, after = digest_of(bits), digest_of(flipped)
    assert before[0] != after[0]
    assert before[1] != after[1]


@given(BITS, st.integers(0, 23), st.integers(0, 23))
def test_swapping_unequal_values_shows(bits: np.ndarray, i: int, j: int) -> None:
    flat = bits.reshape(-1)
    assume(flat[i] != flat[j])
    swapped = flat.copy()
    swapped[[i, j]] = swapped[[j, i]]
    assert digest_of(swapped.reshape(bits.shape)) != digest_of(bits)


def test_swapping_a_value_with_its_negative_shows() -> None:
    """The linear sum alone is blind to this one: the bits differ by 2^31, the weights by 2k."""
    pair = np.array([[1.5, -1.5]], np.float32).view(np.uint32)
    assert digest_of(pair)[0] == digest_of(pair[:, ::-1].copy())[0]
    assert digest_of(pair) != digest_of(pair[:, ::-1].copy())


@given(BITS, st.integers(0, 5))
def test_padding_rows_do_not_matter(bits: np.ndarray, rows: int) -> None:
    padded = np.concatenate([bits, np.zeros((rows, 8), np.uint32)])
    assert digest_of(padded) == digest_of(bits)


def test_hex_is_both_words() -> None:
    blocks = jnp.asarray([[1.0, -2.0, 0.0, 3.5]], jnp.float32)
    linear, mixed = reference(np.asarray(blocks).view(np.uint32))
    assert digest_hex(blocks) == f"{linear:08x}{mixed:08x}"
    assert digest_hex(jnp.zeros((2, 4), jnp.float32)) == "0" * 16


def test_the_combined_digest_covers_each_part_and_no_order() -> None:
    parts = [(0, 0, 3, "aa"), (0, 1, 4, "bb")]
    digest = combine(parts)
    assert len(digest) == 64
    assert combine(parts[::-1]) == digest
    changed = [(1, 1, 4, "bb"), (0, 2, 4, "bb"), (0, 1, 5, "bb"), (0, 1, 4, "bc")]
    assert len({digest, *(combine([parts[0], part]) for part in changed)}) == 5
