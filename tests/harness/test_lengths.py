from __future__ import annotations

import math

from fragments.runspec import RunSpec
from harness.lengths import PAIRS, advice, best_pair, rounds_a_fragment


def _spec(**settings: object) -> RunSpec:
    return RunSpec.model_validate(
        {"budget_tokens": 38400, "sync_interval": "0:4,0.5:12"} | settings
    )


def test_rounds_follow_the_stages_of_h() -> None:
    # 600 steps each: 300 of them at H = 4, 300 at H = 12.
    assert rounds_a_fragment(_spec(), 16, 4) == 100.0
    assert rounds_a_fragment(_spec(), 16, 8) == 50.0


def test_there_is_a_pair_for_every_length() -> None:
    bounds = [pair.up_to_rounds for pair in PAIRS]
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == math.inf
    assert best_pair(bounds[0]) == PAIRS[0]
    assert best_pair(math.nextafter(bounds[0], math.inf)) == PAIRS[1]


def _outer_advice(learning_rate: float, momentum: float, **more: object) -> list[str]:
    outer = {"learning_rate": learning_rate, "momentum": momentum} | more
    return [one for one in advice(_spec(outer=outer), 16, 4) if "--outer" in one]


def test_advice_names_the_better_pair_and_nothing_where_it_is_the_runs_own() -> None:
    best = best_pair(100.0)
    assert _outer_advice(best.learning_rate, best.momentum) == []
    (sentence,) = _outer_advice(0.01, 0.0)
    assert f"--outer.learning-rate {best.learning_rate:g}" in sentence
    assert "about 100 rounds a fragment" in sentence


def test_there_is_no_advice_on_an_optimizer_of_the_users_own() -> None:
    assert _outer_advice(0.01, 0.0, factory="optax:adam") == []
    assert _outer_advice(0.01, 0.0, nesterov=False) == []


def test_the_others_come_later_where_there_are_others() -> None:
    assert any("start one learner" in sentence for sentence in advice(_spec(), 16, 4))
    assert not any("start one learner" in sentence for sentence in advice(_spec(), 16, 1))
