"""One version on, in memory: the bits and the digest are those of a device."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fragments.advance import advance
from fragments.digest import digest_blocks, words_hex
from fragments.payload import MAX_STEP_BITS, MIN_STEP_BITS
from fragments.quantize import apply_update

SHAPE = (3, 8)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
STEPS = st.just(0) | st.integers(MIN_STEP_BITS, MAX_STEP_BITS)


@given(
    hnp.arrays(np.float32, SHAPE, elements=FINITE),
    hnp.arrays(np.int8, SHAPE, elements=st.integers(-127, 127)),
    hnp.arrays(np.uint16, SHAPE[:1], elements=STEPS),
)
def test_the_same_bits_as_on_a_device(
    base: np.ndarray, codes: np.ndarray, steps: np.ndarray
) -> None:
    """Subnormal bases, updates that cancel them, and zero blocks included."""
    device = apply_update(jnp.asarray(base), jnp.asarray(codes), jnp.asarray(steps))
    made, digest = advance(jnp.asarray(base), codes, steps)
    np.testing.assert_array_equal(
        np.asarray(made).view(np.uint32), np.asarray(device).view(np.uint32)
    )
    assert digest == words_hex(np.asarray(digest_blocks(device)))


def test_values_that_are_not_quantized_are_added_as_they_are() -> None:
    base, added = np.array([[1.0, -2.0]], np.float32), np.array([[0.25, 2.0]], np.float32)
    made, _ = advance(jnp.asarray(base), added, np.array([0x3F80], np.uint16))
    np.testing.assert_array_equal(np.asarray(made), [[1.25, 0.0]])
