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


def test_advice_names_the_better_pair_and_nothing_where_it_is_the_runs_own() -> None:
    best = best_pair(100.0)
    own = {"learning_rate": best.learning_rate, "momentum": best.momentum}
    assert advice(_spec(outer=own), 16, 4) is None
    sentence = advice(_spec(outer={"learning_rate": 0.01, "momentum": 0.0}), 16, 4)
    assert sentence is not None
    assert f"--outer.learning-rate {best.learning_rate:g}" in sentence
    assert "about 100 rounds a fragment" in sentence


def test_there_is_no_advice_on_an_optimizer_of_the_users_own() -> None:
    assert advice(_spec(outer={"learning_rate": 0.01, "factory": "optax:adam"}), 16, 4) is None
