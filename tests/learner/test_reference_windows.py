"""Windows: every pass visits each once, shards never meet, and a cursor is all the state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragments.errors import DataError
from learner.program import Shard
from learner.reference.windows import Windows, permute

TEXT = np.arange(1, 1003, dtype=np.int64).astype(np.uint8)


@given(st.integers(1, 700), st.integers(0, 2**32), st.integers(0, 5))
def test_the_order_is_a_permutation(count: int, seed: int, pass_index: int) -> None:
    images = permute(np.arange(count), count, (seed, pass_index))
    assert sorted(images.tolist()) == list(range(count))


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(permute(np.arange(1000), 1000, key).tolist())
        for key in ((0, 0), (0, 1), (1, 0), (1, 1))
    }
    assert len(orders) == 4


def test_neighbours_in_the_text_are_not_neighbours_in_the_order() -> None:
    order = permute(np.arange(100_000), 100_000, (0, 0))
    near = np.abs(np.diff(order)) < 1000
    assert near.mean() == pytest.approx(0.02, abs=0.003)  # what a uniform order gives
    assert np.corrcoef(order[:-1], order[1:])[0, 1] == pytest.approx(0.0, abs=0.02)


@settings(max_examples=30)
@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 2))
def test_shards_are_disjoint_and_cover_each_pass(
    shard_count: int, seq_len: int, pass_index: int
) -> None:
    windows = Windows(TEXT, seq_len, seed=3)
    seen: list[int] = []
    for index in range(shard_count):
        in_pass = len(range(index, windows.count, shard_count))
        shard = Shard(index, shard_count)
        seen += windows.indices(shard, pass_index * in_pass, in_pass).tolist()
    assert sorted(seen) == list(range(windows.count))


@settings(max_examples=50)
@given(st.integers(0, 400), st.integers(1, 300))
def test_any_cut_gives_the_same_sequence(start: int, size: int) -> None:
    """Also across the border between two passes: 50 windows a shard and pass here."""
    windows, shard = Windows(TEXT, 10, seed=9), Shard(1, 2)
    whole = windows.indices(shard, 0, 700)
    np.testing.assert_array_equal(windows.indices(shard, start, size), whole[start : start + size])


def test_every_byte_but_the_first_is_a_target_once() -> None:
    text = np.arange(250, dtype=np.uint8)
    windows = Windows(text, 3, seed=0)
    rows = windows.take(windows.indices(Shard(0, 1), 0, windows.count))
    assert rows.shape == (83, 4)
    assert rows.dtype == np.uint8
    assert sorted(rows[:, 1:].ravel().tolist()) == list(range(1, 250))


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(DataError, match="10 bytes do not fill one window of 11"):
        Windows(TEXT[:10], 10, seed=0)


def test_more_shards_than_windows_are_refused() -> None:
    with pytest.raises(DataError, match="too small for 3 learners: it has 2 windows"):
        Windows(TEXT[:21], 10, seed=0).indices(Shard(0, 3), 0, 1)


def test_a_negative_cursor_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Windows(TEXT, 10, seed=0).indices(Shard(0, 1), -1, 1)


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_shard_outside_its_count_is_refused(index: int, count: int) -> None:
    with pytest.raises(ValueError, match="0 <= index < count"):
        Shard(index, count)


def test_contiguous_shards_are_stretches_of_the_text() -> None:
    windows = Windows(np.arange(401 % 256, dtype=np.uint8).repeat(3)[:401], 4, 7, contiguous=True)
    assert windows.count == 100
    seen = [windows.indices(Shard(index, 3), 0, 33 + (index == 2)) for index in range(3)]
    assert [sorted(part.tolist()) for part in seen] == [
        list(range(33)),
        list(range(33, 66)),
        list(range(66, 100)),
    ]
    again = windows.indices(Shard(1, 3), 33, 33)
    assert sorted(again.tolist()) == list(range(33, 66))
    assert again.tolist() != seen[1].tolist()
