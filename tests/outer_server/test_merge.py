"""Radial-directional averaging, with vectors worked by hand, and its properties."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragments.layout import TensorSpec, build_layout
from fragments.quantize import quantize, valid_counts
from outer_server.core.merge import Encoded, Part, merge

BLOCK = 4
LAYOUT = build_layout(
    [TensorSpec("v", (2,), "float32"), TensorSpec("w", (6,), "float32", averaged=True)],
    1,
    BLOCK,
    "test",
)
FRAGMENT = LAYOUT.fragments[0]
ROW_OF = {slot.spec.path: slot.row_start for slot in FRAGMENT.slots}


def _encoded(v: tuple[float, float], w: float = 0.0) -> Encoded:
    """v exactly (step 1), and w in every value of the averaged tensor."""
    codes = np.zeros((LAYOUT.rows_padded, BLOCK), np.int8)
    codes[ROW_OF["v"], :2] = v
    codes[ROW_OF["w"], :] = codes[ROW_OF["w"] + 1, :2] = w
    bits = np.full(LAYOUT.rows_padded, 0x3F80, np.uint16)  # bfloat16 1.0
    return codes, bits


def _merged(parts: list[tuple[float, tuple[float, float]]], *, radial: bool = True) -> np.ndarray:
    made = [Part(share, (_encoded(v),)) for share, v in parts]
    blocks = np.asarray(merge(made, FRAGMENT, LAYOUT.rows_padded, radial=radial))
    return blocks[ROW_OF["v"], :2]


def test_parallel_vectors_keep_their_direction_and_mean_norm() -> None:
    np.testing.assert_allclose(_merged([(0.5, (3, 4)), (0.5, (6, 8))]), [4.5, 6.0], rtol=1e-6)


def test_orthogonal_vectors_keep_the_mean_norm_that_the_average_loses() -> None:
    # Mean norm 5; direction (1, 1)/sqrt 2; the plain average has norm 3.54.
    side = 5 / math.sqrt(2)
    parts = [(0.5, (5.0, 0.0)), (0.5, (0.0, 5.0))]
    np.testing.assert_allclose(_merged(parts), [side, side], rtol=1e-6)
    np.testing.assert_allclose(_merged(parts, radial=False), [2.5, 2.5], rtol=1e-6)


def test_shares_weigh_norms_and_directions() -> None:
    # Norm .75*4 + .25*8 = 5; direction (.75, .25)/sqrt(.625), gain 1/.79 below sqrt(1.6).
    x, y = 5 * 0.75 / math.sqrt(0.625), 5 * 0.25 / math.sqrt(0.625)
    np.testing.assert_allclose(_merged([(0.75, (4, 0)), (0.25, (0, 8))]), [x, y], rtol=1e-6)


def test_a_residual_of_cancelling_vectors_is_not_blown_up() -> None:
    # Directions (1, 0) and (-0.8, 0.6): their mean is (0.1, 0.3), of norm .316, so phi would give
    # a gain of 3.16; it is bounded by sqrt(n_eff) = sqrt 2.
    expected = 10 * math.sqrt(2) * np.array([0.1, 0.3])
    np.testing.assert_allclose(_merged([(0.5, (10, 0)), (0.5, (-8, 6))]), expected, rtol=1e-6)


def test_opposite_and_zero_vectors_give_zero() -> None:
    # A fused multiply-add may leave the rounding of 0.5/7 behind, bounded like any residual.
    np.testing.assert_allclose(_merged([(0.5, (7, 0)), (0.5, (-7, 0))]), [0, 0], atol=1e-6)
    np.testing.assert_array_equal(_merged([(1.0, (0, 0))]), [0, 0])


def test_a_zero_vector_adds_no_direction_but_counts_in_the_norm() -> None:
    # Norm (5 + 0)/2; direction .5*(.6, .8), of norm .5, gain bounded by sqrt 2.
    expected = 2.5 * math.sqrt(2) * 0.5 * np.array([0.6, 0.8])
    np.testing.assert_allclose(_merged([(0.5, (3, 4)), (0.5, (0, 0))]), expected, rtol=1e-6)


def test_a_late_and_a_fresh_contribution_count_as_their_sum() -> None:
    part = Part(1.0, (_encoded((3, 0)), _encoded((0, 4))))
    blocks = np.asarray(merge([part], FRAGMENT, LAYOUT.rows_padded, radial=True))
    np.testing.assert_allclose(blocks[ROW_OF["v"], :2], [3, 4], rtol=1e-6)


def test_declared_tensors_are_averaged_even_in_a_radial_merge() -> None:
    parts = [Part(0.25, (_encoded((5, 0), w=8),)), Part(0.75, (_encoded((0, 5), w=-4),))]
    blocks = np.asarray(merge(parts, FRAGMENT, LAYOUT.rows_padded, radial=True))
    np.testing.assert_allclose(blocks[ROW_OF["w"]], np.full(4, -1.0), rtol=1e-6)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 6), radial=st.booleans())
def test_against_a_plain_reference(seed: int, count: int, radial: bool) -> None:
    generator = np.random.default_rng(seed)
    shares = generator.dirichlet(np.ones(count))
    valid = valid_counts(FRAGMENT, LAYOUT.rows_padded)
    mask = np.arange(BLOCK)[None, :] < valid[:, None]
    parts, vectors = [], []
    for share in shares:
        value = np.where(mask, generator.normal(size=mask.shape), 0).astype(np.float32)
        q = quantize(jnp.asarray(value), jnp.asarray(valid), 0.5)
        codes, bits = np.asarray(q.codes), np.asarray(q.step_bits)
        steps = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        vectors.append(codes * steps[:, None])
        parts.append(Part(float(share), ((codes, bits),)))
    expected = np.zeros(mask.shape)
    for slot in FRAGMENT.slots:
        rows = slice(slot.row_start, slot.row_stop)
        vs = [v[rows] for v in vectors]
        if not radial or slot.spec.averaged:
            expected[rows] = sum(s * v for s, v in zip(shares, vs, strict=True))
            continue
        norms = [float(np.linalg.norm(v)) for v in vs]
        d = sum(s * v / (n or 1) for s, v, n in zip(shares, vs, norms, strict=True))
        gain = min(1 / float(np.linalg.norm(d)), math.sqrt(1 / float(np.sum(shares**2))))
        expected[rows] = float(np.dot(shares, norms)) * float(gain) * d
    found = merge(parts, FRAGMENT, LAYOUT.rows_padded, radial=radial)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("radial", [False, True])
def test_a_learner_replaced_by_two_halves_changes_nothing(radial: bool) -> None:
    """Half the tokens and half the steps each: tokens^2/steps is half the weight each."""
    whole = _merged([(0.6, (3, 4)), (0.4, (8, 6))], radial=radial)
    halves = _merged([(0.3, (3, 4)), (0.3, (3, 4)), (0.4, (8, 6))], radial=radial)
    np.testing.assert_allclose(whole, halves, rtol=1e-6)


def test_values_without_a_finite_norm_give_nothing_finite_and_no_warning() -> None:
    """Any finite float32 may come over the wire; the outer step then refuses what is not finite."""
    codes = np.zeros((LAYOUT.rows_padded, BLOCK), np.float32)
    codes[ROW_OF["v"], :2] = np.finfo(np.float32).max
    bits = np.full(LAYOUT.rows_padded, 0x3F80, np.uint16)
    merged = merge([Part(1.0, ((codes, bits),))], FRAGMENT, LAYOUT.rows_padded, radial=True)
    assert not np.isfinite(merged[ROW_OF["v"], :2]).any()
