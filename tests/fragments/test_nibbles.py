"""Nibbles: every array comes back, in one form only, and no other form is taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fragments.errors import PayloadError
from fragments.nibbles import Packed, half, pack, unpack

SHAPES = st.tuples(st.integers(0, 70), st.integers(1, 70))
MOSTLY_SMALL = st.integers(-7, 7) | st.integers(-7, 7) | st.integers(-127, 127)


def back(packed: Packed, shape: tuple[int, int]) -> np.ndarray:
    out = np.zeros(shape, np.int8)
    unpack(packed, out)
    return out


@given(
    SHAPES.flatmap(lambda shape: hnp.arrays(np.int8, shape, elements=MOSTLY_SMALL, fill=st.just(0)))
)
def test_what_is_packed_comes_back(codes: np.ndarray) -> None:
    packed = pack(codes)
    np.testing.assert_array_equal(back(packed, codes.shape), codes, strict=True)
    escaped = np.count_nonzero(np.abs(codes.astype(int)) > 7, axis=1)
    np.testing.assert_array_equal(packed.wide_B, escaped * 16 > codes.shape[1])
    assert packed.narrow.shape == (np.count_nonzero(~packed.wide_B), half(codes.shape[1]))
    assert len(packed.escapes) == escaped[~packed.wide_B].sum()


def test_the_layout_of_a_row_by_hand() -> None:
    packed = pack(np.array([[1, -1, 7, -7, 2]], np.int8))
    assert packed.narrow.tolist() == [[0x91, 0x2F, 0x07]]


def _row(**changes: int) -> np.ndarray:
    codes = np.zeros((1, 32), np.int8)
    for place, value in changes.items():
        codes[0, int(place[1:])] = value
    return codes


@pytest.mark.parametrize(
    ("packed", "sentence"),
    [
        (replace(pack(_row()), escapes=np.array([9], np.int8)), "lists 1 escaped.* there are 0"),
        (replace(pack(_row(_3=9)), escapes=np.zeros(0, np.int8)), "lists 0 escaped.* there are 1"),
        (replace(pack(_row(_3=9)), escapes=np.array([7], np.int8)), "fits a nibble"),
        (
            Packed(np.array([True]), np.zeros((0, 16), np.uint8), _row(_3=9), np.zeros(0, np.int8)),
            "wide block that should be narrow",
        ),
        (
            Packed(
                np.array([False]), np.full((1, 16), 0x88, np.uint8), np.zeros((0, 32), np.int8),
                np.full(32, 9, np.int8),
            ),
            "narrow block that should be wide",
        ),
    ],
)  # fmt: skip
def test_no_second_form_of_an_array_is_taken(packed: Packed, sentence: str) -> None:
    with pytest.raises(PayloadError, match=sentence):
        back(packed, (1, 32))


def test_a_symbol_beyond_the_end_of_a_block_is_refused() -> None:
    packed = pack(np.array([[1, 2, 3]], np.int8))
    damaged = packed.narrow.copy()
    damaged[0, -1] |= 0x10
    with pytest.raises(PayloadError, match="beyond the end"):
        back(replace(packed, narrow=damaged), (1, 3))
