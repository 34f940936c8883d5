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
