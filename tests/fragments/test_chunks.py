"""Chunks: in order, once each, bounded, and resumable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragments.chunks import CHUNK_BYTES, Assembler, split
from fragments.errors import PayloadError


@given(st.binary(min_size=1, max_size=200), st.integers(1, 50), st.data())
def test_a_broken_transfer_resumes_where_it_broke(
    data: bytes, chunk_bytes: int, draw: st.DataObject
) -> None:
    assembler = Assembler(len(data), limit=len(data))
    chunks = list(split(data, chunk_bytes))
    assert all(1 <= len(chunk.data) <= chunk_bytes for chunk in chunks)
    for chunk in chunks[: draw.draw(st.integers(0, len(chunks)))]:
        assembler.append(*chunk)
    other_size = draw.draw(st.integers(1, 50))
    for chunk in split(data, other_size, offset=assembler.received):
        assert not assembler.complete
        assembler.append(*chunk)
    assert assembler.complete
    assert assembler.finish() == data


def test_a_resumed_transfer_that_is_complete_has_no_chunks() -> None:
    assert list(split(b"abc", 2, offset=3)) == []


@pytest.mark.parametrize("offset", [-1, 4])
def test_an_offset_outside_the_data_is_refused(offset: int) -> None:
    with pytest.raises(PayloadError, match=f"byte {offset} "):
        split(b"abc", 2, offset)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"ab", "expected 2"),
        (1, b"b", "expected 2"),
        (3, b"d", "expected 2"),
        (-1, b"d", "expected 2"),
        (2, b"", "empty"),
        (2, b"cdef", "past the declared 5 bytes"),
    ],
)
def test_a_chunk_that_does_not_fit_changes_nothing(offset: int, data: bytes, message: str) -> None:
    assembler = Assembler(5, limit=10)
    assert assembler.append(0, b"ab") == 2
    with pytest.raises(PayloadError, match=message):
        assembler.append(offset, data)
    assert assembler.received == 2
    with pytest.raises(PayloadError, match="2 of 5 bytes"):
        assembler.finish()
    assembler.append(2, b"cde")
    assert assembler.finish() == b"abcde"


@pytest.mark.parametrize("total_bytes", [-1, 0, 11, 1 << 62])
def test_a_declared_size_beyond_the_limit_is_refused(total_bytes: int) -> None:
    with pytest.raises(PayloadError, match=f"{total_bytes} bytes"):
        Assembler(total_bytes, limit=10)


def test_a_declared_size_allocates_nothing() -> None:
    assembler = Assembler(1 << 50, limit=1 << 60)
    assert assembler.append(0, b"x") == 1


def test_the_default_chunk_is_a_mebibyte() -> None:
    assert [len(chunk.data) for chunk in split(bytes(CHUNK_BYTES + 1))] == [1 << 20, 1]
