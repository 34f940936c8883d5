"""Merge weights and their bound, with numbers worked by hand."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragments.records import ContributionKey, Version
from outer_server.core.state import ContributionMeta
from outer_server.core.weights import bounded_shares, merge_order, raw_weight


def _meta(learner: str, base: int, steps: int, tokens: int) -> ContributionMeta:
    key = ContributionKey(learner, 0, Version(1, base))
    return ContributionMeta(key, steps, tokens, 0, steps)


def test_a_weight_is_tokens_times_their_rate() -> None:
    assert raw_weight(tokens=100, steps=10) == 1000.0
    assert raw_weight(tokens=50, steps=10) == 250.0


def test_no_weight_is_above_twice_the_median() -> None:
    # Median 10, so 90 counts as 20: shares 10, 10, 20 of 40.
    assert bounded_shares([10.0, 10.0, 90.0], 2.0) == (0.25, 0.25, 0.5)
    assert bounded_shares([7.0], 2.0) == (1.0,)
    # Of two the lower is the median: 10 and 20 of 30.
    assert bounded_shares([10.0, 90.0], 2.0) == (10 / 30, 20 / 30)


def test_a_late_and_a_fresh_contribution_of_one_learner_count_as_one() -> None:
    arrived = [_meta("b", 3, 4, 40), _meta("a", 2, 6, 60), _meta("a", 1, 4, 40)]
    order = merge_order(0, 3, arrived, weight_bound=10.0)
    assert [p.learner for p in order.participants] == ["a", "b"]
    a, b = order.participants
    assert [m.key.base_version.number for m in a.contributions] == [1, 2]
    # a: 100 tokens in 10 steps = 1000; b: 40 in 4 = 400.
    assert a.share == pytest.approx(1000 / 1400)
    assert b.share == pytest.approx(400 / 1400)


@given(
    parts=st.dictionaries(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 3)),
        st.tuples(st.integers(1, 100), st.integers(1, 10_000)),
        min_size=1,
    ),
    seed=st.integers(0, 2**32),
)
def test_the_order_of_arrival_changes_nothing(
    parts: dict[tuple[str, int], tuple[int, int]], seed: int
) -> None:
    metas = [_meta(name, base, steps, tokens) for (name, base), (steps, tokens) in parts.items()]
    shuffled = list(metas)
    Random(seed).shuffle(shuffled)
    order = merge_order(0, 3, metas, 2.0)
    assert merge_order(0, 3, shuffled, 2.0) == order
    assert sum(p.share for p in order.participants) == pytest.approx(1.0)


OUT_OF_REACH = 1e12
"""A weight bound that bounds nothing here."""


def _shares(metas: list[ContributionMeta], bound: float) -> dict[str, float]:
    return {p.learner: p.share for p in merge_order(0, 3, metas, bound).participants}


@given(
    half=st.tuples(st.integers(1, 100), st.integers(1, 10_000)),
    others=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 10_000)), max_size=4),
)
def test_a_learner_replaced_by_two_halves_has_their_share(
    half: tuple[int, int], others: list[tuple[int, int]]
) -> None:
    """Two with half its tokens and half its steps each: under the average nothing changes."""
    steps, tokens = half
    rest = [_meta(f"other{index}", 3, *one) for index, one in enumerate(others)]
    whole = _shares([_meta("a", 3, 2 * steps, 2 * tokens), *rest], OUT_OF_REACH)
    halves = _shares(
        [_meta("a1", 3, steps, tokens), _meta("a2", 3, steps, tokens), *rest], OUT_OF_REACH
    )
    assert halves["a1"] == halves["a2"]
    assert halves["a1"] + halves["a2"] == pytest.approx(whole["a"])
    for meta in rest:
        assert halves[meta.key.learner] == pytest.approx(whole[meta.key.learner])


def test_the_bound_counts_learners_so_halves_are_not_a_whole_to_it() -> None:
    # Whole: 1000 and 400, the lower median 400, so that 1000 counts as 800 of 1200.
    whole = _shares([_meta("a", 3, 10, 100), _meta("b", 3, 4, 40)], 2.0)
    assert whole == pytest.approx({"a": 800 / 1200, "b": 400 / 1200})
    # Halves: 500, 500 and 400, the median 500, and nobody is above 1000.
    halves = _shares([_meta("a1", 3, 5, 50), _meta("a2", 3, 5, 50), _meta("b", 3, 4, 40)], 2.0)
    assert halves == pytest.approx({"a1": 500 / 1400, "a2": 500 / 1400, "b": 400 / 1400})
