"""The codec's kinds: what is reduced comes back, and how far it is from what was given."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fragments.codec import Codec
from fragments.errors import PayloadError
from fragments.layout import TensorSpec, build_layout
from fragments.quantize import dequantize, valid_counts
from fragments.runspec import CodecKind, CodecSettings

LAYOUT = build_layout(
    [TensorSpec("w", (40, 13), "float32"), TensorSpec("b", (7,), "float32")], 1, 64, "codec"
)
PART, ROWS = LAYOUT.fragments[0], LAYOUT.rows_padded
VALID = jnp.asarray(valid_counts(PART, ROWS))
KINDS: list[CodecKind] = ["int8", "absmax", "bf16", "f32"]


def difference() -> np.ndarray:
    values = np.random.default_rng(3).standard_normal((ROWS, 64)).astype(np.float32)
    columns = np.arange(64)
    return np.where(columns < np.asarray(VALID)[:, None], values, 0)


def there_and_back(kind: CodecKind, x: np.ndarray, step_fraction: float = 1.0) -> np.ndarray:
    codec = Codec.of(CodecSettings(kind=kind))
    reduced = codec.reduce(jnp.asarray(x), VALID, step_fraction)
    assert bool(reduced.finite)
    payload = codec.encode(PART, reduced.codes, reduced.step_bits)
    assert payload.codec == codec.id
    assert len(payload.data) <= codec.max_wire_bytes(PART)
    symbols, steps = codec.decode(PART, ROWS, payload)
    np.testing.assert_array_equal(symbols, np.asarray(reduced.codes), strict=True)
    np.testing.assert_array_equal(steps, np.asarray(reduced.step_bits), strict=True)
    return np.asarray(dequantize(jnp.asarray(symbols), jnp.asarray(steps)))


def test_float32_is_exact_and_bfloat16_rounds_to_nearest_even() -> None:
    x = difference()
    np.testing.assert_array_equal(there_and_back("f32", x), x)
    np.testing.assert_array_equal(
        there_and_back("bf16", x), np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32)
    )


@pytest.mark.parametrize(("kind", "share"), [("int8", 1.0), ("absmax", 0.0)])
def test_the_error_is_at_most_half_a_step(kind: CodecKind, share: float) -> None:
    x = difference()
    counts = np.maximum(np.asarray(VALID), 1)
    rms = np.sqrt(np.sum(x**2, axis=1) / counts)
    step = np.maximum(share * rms, np.abs(x).max(axis=1) / 127)
    error = np.abs(there_and_back(kind, x) - x).max(axis=1)
    assert (error <= 0.502 * step).all()
    assert error.max() > 0.3 * step.max()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_nothing(kind: CodecKind) -> None:
    codec = Codec.of(CodecSettings(kind=kind))
    symbols, steps = codec.decode(PART, ROWS, codec.nothing(PART, ROWS))
    assert not np.asarray(dequantize(jnp.asarray(symbols), jnp.asarray(steps))).any()
    np.testing.assert_array_equal(there_and_back(kind, np.zeros((ROWS, 64), np.float32)), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_not_finite_is_told(kind: CodecKind) -> None:
    x = difference()
    x[0, 0] = np.nan
    assert not bool(Codec.of(CodecSettings(kind=kind)).reduce(jnp.asarray(x), VALID, 1.0).finite)


def test_one_kind_does_not_read_another() -> None:
    f32, int8 = (Codec.of(CodecSettings(kind=kind)) for kind in ("f32", "int8"))
    with pytest.raises(PayloadError, match="codec is 'f32-zstd/1'"):
        int8.decode(PART, ROWS, f32.nothing(PART, ROWS))
