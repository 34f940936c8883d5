"""The quantizer against a numpy reference, and updates that are equal to the bit everywhere."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jaxtyping import Array

from fragments.codec import Codec
from fragments.layout import TensorSpec, build_layout
from fragments.quantize import (
    Quantized,
    apply_update,
    dequantize,
    flush_subnormals,
    quantize,
    step_values,
    valid_counts,
)

SHAPE = (3, 16)
FULL = np.full(3, 16, np.int32)

# Of every exponent alike, not only those near 1: any float32 bit pattern that is finite.
finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary_floats = st.floats(-(2.0**90), 2.0**90, width=32)
blocks = hnp.arrays(np.float32, SHAPE, elements=ordinary_floats)
fractions = st.floats(2.0**-7, 4.0, width=32)
step_bits = st.just(0) | st.integers((127 - 100) << 7, (127 + 100) << 7)


def reference_steps(x: np.ndarray, valid: np.ndarray, c: float) -> np.ndarray:
    """Bits of the steps, computed in float64."""
    wide = x.astype(np.float64)
    absmax = np.abs(wide).max(axis=1)
    rms = np.sqrt((wide**2).sum(axis=1) / np.maximum(valid, 1))
    steps = np.maximum(c * rms, absmax / 127).astype(np.float32).astype(ml_dtypes.bfloat16)
    bits: np.ndarray = np.where(steps.astype(np.float64) < 2.0**-100, 0, steps.view(np.uint16))
    return bits


def steps_of(bits: np.ndarray) -> np.ndarray:
    steps: np.ndarray = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    return steps


def reference_update(base: np.ndarray, codes: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Float32 numpy, which honours subnormals and does not fuse."""
    total = base + codes.astype(np.float32) * steps_of(bits)[:, None]
    return np.where(np.abs(total) < np.float32(2.0**-126), np.float32(0), total)


def test_full_and_last_rows_have_their_valid_counts() -> None:
    specs = [
        TensorSpec(name, (size,), "float32")
        for name, size in zip("abcd", [0, 1, 8, 19], strict=True)
    ]
    other = TensorSpec("e", (200,), "float32")
    layout = build_layout([*specs, other], 2, 8, "")
    small = next(f for f in layout.fragments if len(f.slots) == 4)
    counts = valid_counts(small, layout.rows_padded)
    assert counts.dtype == np.int32
    assert counts.tolist() == [1, 8, 8, 8, 3] + [0] * 20


def in_memory(x: Array, valid: np.ndarray, c: float) -> Quantized:
    """The codec's, of what is in memory."""
    quantized = Codec("int8", 1).reduce(x, jnp.asarray(valid), c)
    assert isinstance(quantized, Quantized)
    return quantized


Quantizer = Callable[[Array, np.ndarray, float], Quantized]
QUANTIZERS = [quantize, in_memory]


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@given(blocks, fractions)
def test_steps_and_codes_are_those_of_the_reference(
    quantizer: Quantizer, x: np.ndarray, c: float
) -> None:
    quantized = quantizer(jnp.asarray(x), FULL, c)
    codes, bits = np.asarray(quantized.codes), np.asarray(quantized.step_bits)
    assert bool(quantized.finite)
    assert (codes.dtype.name, bits.dtype.name) == ("int8", "uint16")
    # The sum of squares is taken in another order and precision: one unit of bfloat16 at a tie.
    expected = reference_steps(x, FULL, c)
    distance = np.abs(bits.astype(np.int32) - expected.astype(np.int32))
    # (Or one of them is 0 and the other the smallest step.)
    assert (np.minimum(distance, np.abs(distance - ((127 - 100) << 7))) <= 1).all()
    steps = steps_of(bits)[:, None]
    divided = np.divide(x, steps, out=np.zeros_like(x), where=steps > 0)
    np.testing.assert_array_equal(codes, np.rint(divided).astype(np.int8))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@given(blocks, fractions)
def test_the_error_is_at_most_half_a_step(quantizer: Quantizer, x: np.ndarray, c: float) -> None:
    quantized = quantizer(jnp.asarray(x), FULL, c)
    restored = np.asarray(dequantize(quantized.codes, quantized.step_bits), np.float64)
    steps = np.asarray(step_values(quantized.step_bits), np.float64)[:, None]
    error = np.abs(restored - x.astype(np.float64))
    # A zero block has lost values below 127 * 2^-100; a tie may be decided by the division's ulp.
    assert (error <= np.where(steps > 0, steps / 2 * (1 + 2.0**-15), 127 * 2.0**-100)).all()


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_no_symbol_passes_127_wherever_the_step_is_rounded(quantizer: Quantizer) -> None:
    """Around every tie of the rounding of absmax/127 to bfloat16, where symbols are largest."""
    ties = (np.uint32(127 << 23) + (np.arange(128, dtype=np.uint32) << 16)) | np.uint32(0x8000)
    near = (ties[:, None] + np.arange(-400, 400, dtype=np.int64)[None, :]).astype(np.uint32)
    x = np.zeros((near.size, 2), np.float32)
    x[:, 0] = near.reshape(-1).view(np.float32) * np.float32(127)
    x[1::2] *= -1
    quantized = quantizer(jnp.asarray(x), np.full(near.size, 2, np.int32), 1e-6)
    codes = np.asarray(quantized.codes)
    assert bool(quantized.finite)
    assert set(np.unique(np.abs(codes.astype(np.int32)))) <= {0, 126, 127}
    np.testing.assert_array_equal(np.sign(codes), np.sign(x))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_only_valid_values_count_for_the_rms(quantizer: Quantizer) -> None:
    """One value in a padded row is its own RMS: with c = 1/2 its symbol is 2, exactly."""
    x = np.zeros(SHAPE, np.float32)
    x[0, 0], x[1, :4], x[2] = -3.0, 0.5, 7.0
    quantized = quantizer(jnp.asarray(x), np.array([1, 4, 16], np.int32), 0.5)
    assert np.asarray(quantized.step_bits).view(ml_dtypes.bfloat16).tolist() == [1.5, 0.25, 3.5]
    assert np.asarray(quantized.codes)[:, 0].tolist() == [-2, 2, 2]
    np.testing.assert_array_equal(dequantize(quantized.codes, quantized.step_bits), x)


@pytest.mark.parametrize("width", [1, 5, 16, 37, 4096])
def test_rows_of_any_width_are_measured_whole(width: int) -> None:
    """The last values alone, which are in no whole group of lanes, make the step and the codes."""
    x = np.zeros((2, width), np.float32)
    x[0, -1], x[1] = 3.0, np.random.default_rng(width).normal(size=width)
    valid = np.full(2, width, np.int32)
    made = in_memory(jnp.asarray(x), valid, 0.5)
    expected = reference_steps(x, valid, 0.5)
    assert np.abs(np.asarray(made.step_bits).astype(int) - expected.astype(int)).max() <= 1
    steps = steps_of(np.asarray(made.step_bits))[:, None]
    np.testing.assert_array_equal(made.codes, np.rint(x / steps).astype(np.int8))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_padding_rows_and_zero_blocks_have_code_0(quantizer: Quantizer) -> None:
    quantized = quantizer(jnp.zeros(SHAPE), np.array([16, 1, 0], np.int32), 0.5)
    assert not np.asarray(quantized.codes).any()
    assert not np.asarray(quantized.step_bits).any()
    assert bool(quantized.finite)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 2.0**126, 3.4e38, -3.4e38])
@pytest.mark.parametrize("place", [(0, 0), (1, 7), (2, 15)])
def test_what_cannot_be_encoded_is_flagged(
    quantizer: Quantizer, odd: float, place: tuple[int, int]
) -> None:
    x = np.ones(SHAPE, np.float32)
    x[place] = odd
    quantized = quantizer(jnp.asarray(x), FULL, 0.5)
    assert not bool(quantized.finite)
    assert not np.asarray(quantized.codes)[place[0]].any()
    assert np.asarray(quantized.step_bits)[place[0]] == 0


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("scale", [2.0**99, 2.0**60, 1.0, 2.0**-60, 2.0**-90])
def test_the_range_of_steps_is_used_without_overflow(quantizer: Quantizer, scale: float) -> None:
    """Squares of these overflow or vanish in float32."""
    x = (np.arange(48, dtype=np.float32).reshape(SHAPE) - 20) / 16
    scaled = quantizer(jnp.asarray(x * np.float32(scale)), FULL, 0.5)
    plain = quantizer(jnp.asarray(x), FULL, 0.5)
    assert bool(scaled.finite)
    np.testing.assert_array_equal(scaled.codes, plain.codes)
    np.testing.assert_array_equal(
        step_values(scaled.step_bits), np.asarray(step_values(plain.step_bits)) * scale
    )


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("tiny", [2.0**-149, -(2.0**-127), 2.0**-126, 2.0**-101])
def test_a_block_of_tiny_values_is_zero(quantizer: Quantizer, tiny: float) -> None:
    quantized = quantizer(jnp.full(SHAPE, tiny, jnp.float32), FULL, 0.5)
    assert not np.asarray(quantized.codes).any()
    assert not np.asarray(quantized.step_bits).any()
    assert bool(quantized.finite)


@given(
    hnp.arrays(np.int8, SHAPE, elements=st.integers(-127, 127)),
    hnp.arrays(np.uint16, SHAPE[0], elements=step_bits),
)
def test_dequantized_values_are_exact(codes: np.ndarray, bits: np.ndarray) -> None:
    exact = codes.astype(np.float64) * steps_of(bits).astype(np.float64)[:, None]
    np.testing.assert_array_equal(np.asarray(dequantize(codes, bits), np.float64), exact)


@st.composite
def updates(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A base near the negative of its update, or near a rounding tie, or anything."""
    codes = draw(hnp.arrays(np.int8, SHAPE, elements=st.integers(-127, 127)))
    bits = draw(hnp.arrays(np.uint16, SHAPE[0], elements=step_bits))
    update = codes.astype(np.float32) * steps_of(bits)[:, None]
    kind = draw(st.sampled_from(["any", "cancel", "tie", "subnormal"]))
    base = draw(hnp.arrays(np.float32, SHAPE, elements=finite_floats))
    if kind == "cancel":
        shift = draw(hnp.arrays(np.int32, SHAPE, elements=st.integers(-3, 3)))
        base = ((-update).view(np.int32) + np.where(update == 0, 0, shift)).view(np.float32)
        base = np.where(np.isfinite(base), base, -update)
    elif kind == "tie":
        with np.errstate(over="ignore"):
            base = update * np.float32(2.0**24)
        base = np.where(np.isfinite(base), base, np.float32(1))
    elif kind == "subnormal":
        tiny = draw(hnp.arrays(np.uint32, SHAPE, elements=st.integers(0, 0x00800001)))
        base = np.where(codes % 2 == 0, tiny.view(np.float32), -tiny.view(np.float32))
    return base, codes, bits


@given(updates())
def test_an_update_gives_the_bits_of_numpy(
    update: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    with np.errstate(over="ignore"):
        expected = reference_update(*update).view(np.uint32)
    compiled = np.asarray(apply_update(*update)).view(np.uint32)
    np.testing.assert_array_equal(compiled, expected)
    with jax.disable_jit():
        eager = np.asarray(apply_update(*(jnp.asarray(part) for part in update)))
    np.testing.assert_array_equal(eager.view(np.uint32), expected)


@given(
    hnp.arrays(np.uint32, SHAPE, elements=st.integers(0, 2**32 - 1) | st.integers(0, 0x00800002))
)
@example(np.full(SHAPE, 0x80000000, np.uint32))
@example(np.full(SHAPE, 0x807FFFFF, np.uint32))
@example(np.full(SHAPE, 0x80800000, np.uint32))
def test_subnormals_are_flushed_and_all_else_is_kept(bits: np.ndarray) -> None:
    expected = np.where((bits & 0x7FFFFFFF) < 0x00800000, 0, bits)
    flushed = np.asarray(flush_subnormals(jnp.asarray(bits).view(jnp.float32)))
    np.testing.assert_array_equal(flushed.view(np.uint32), expected)


def test_one_compilation_serves_every_fragment(compilations: list[str]) -> None:
    x = jnp.ones((7, 16))
    quantize(x, np.full(7, 16, np.int32), 0.5)
    before = len(compilations)
    quantize(x, np.array([16, 16, 3, 1, 0, 0, 0], np.int32), 0.25)
    assert len(compilations) == before
