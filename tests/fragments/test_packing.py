"""Packing: every array comes back, in the smallest form that suits each row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fragments.errors import PayloadError
from fragments.packing import NIBBLES, TRITS, WIDE, Packed, pack, row_bytes, unpack

SHAPES = st.tuples(st.integers(0, 70), st.integers(1, 300))
SMALL = st.integers(-1, 1) | st.integers(-7, 7) | st.integers(-127, 127)


def back(packed: Packed, shape: tuple[int, int]) -> np.ndarray:
    out = np.full(shape, 77, np.int8)
    unpack(packed, out)
    return out


def at_random(rows: int, width: int, bound: int, outliers: int, seed: int) -> np.ndarray:
    """Symbols within the bound, with so many outliers in each row."""
    random = np.random.default_rng(seed)
    codes = random.integers(-bound, bound + 1, (rows, width)).astype(np.int8)
    for row in codes:
        places = random.permutation(width)[:outliers]
        row[places] = random.choice([-127, -9, 8, 127], len(places))
    return codes


@given(SHAPES.flatmap(lambda shape: hnp.arrays(np.int8, shape, elements=SMALL, fill=st.just(0))))
def test_what_is_packed_comes_back(codes: np.ndarray) -> None:
    packed = pack(codes)
    np.testing.assert_array_equal(back(packed, codes.shape), codes, strict=True)
    size = sum(row_bytes(int(form), codes.shape[1]) for form in packed.forms_B)
    assert size == packed.trits.size + packed.nibbles.size + packed.wide.size
    assert size + packed.trit_escapes.size + packed.nibble_escapes.size <= codes.size


@given(
    st.sampled_from([(1, 0), (1, 3), (7, 0), (7, 12), (7, 13), (127, 0)]),
    st.integers(1, 90),
    st.integers(200, 203),
    st.integers(0, 9),
)
def test_outliers_are_escaped(kind: tuple[int, int], rows: int, width: int, seed: int) -> None:
    codes = at_random(rows, width, kind[0], kind[1], seed)
    packed = pack(codes)
    np.testing.assert_array_equal(back(packed, codes.shape), codes, strict=True)
    expected = {(1, 0): TRITS, (1, 3): TRITS, (7, 0): NIBBLES, (7, 12): NIBBLES}.get(kind, WIDE)
    assert set(packed.forms_B) == {expected}


def test_forms_may_alternate() -> None:
    parts = [at_random(70, 257, bound, 1, seed) for seed, bound in enumerate((1, 7, 127))]
    codes = np.stack(parts, axis=1).reshape(-1, 257)
    packed = pack(codes)
    assert packed.forms_B.tolist() == [TRITS, NIBBLES, WIDE] * 70
    np.testing.assert_array_equal(back(packed, codes.shape), codes, strict=True)


def test_the_forms_by_hand() -> None:
    nibbles = pack(np.array([[1, -1, 7, -7, 2]], np.int8))
    assert nibbles.nibbles.tolist() == [[0x91, 0x2F, 0x07]]
    # Two bytes: symbols 0, 2, 4, 6 and 1, 3, 5 with padding; a symbol s counts 1 + s.
    trits = pack(np.array([[1, -1, 0, 0, -1, 1, 1]], np.int8))
    first, second = 2 + 3 * 1 + 9 * 0 + 27 * 2 + 81, 0 + 3 * 1 + 9 * 2 + 27 + 81
    assert trits.trits.tolist() == [[first, second]]


def _with(**changes: np.ndarray) -> Packed:
    return replace(pack(at_random(3, 301, 7, 0, 0)), **changes)


@pytest.mark.parametrize(
    ("packed", "sentence"),
    [
        (_with(nibble_escapes=np.array([9], np.int8)), "lists 1 escaped.* there are 0"),
        (_with(nibbles=np.full((3, 151), 0x08, np.uint8)), "lists 0 escaped.* there are 453"),
        (_with(nibbles=np.full((3, 151), 0x10, np.uint8)), "beyond the end"),
        (
            replace(pack(np.zeros((1, 301), np.int8)), trits=np.full((1, 61), 244, np.uint8)),
            "no group of trits",
        ),
        (
            replace(pack(np.zeros((1, 301), np.int8)), trits=np.full((1, 61), 242, np.uint8)),
            "beyond the end",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(packed: Packed, sentence: str) -> None:
    with pytest.raises(PayloadError, match=sentence):
        back(packed, (len(packed.forms_B), 301))
