"""The run's trained tokens as one learner knows them."""

from __future__ import annotations

from learner.tokens import TokenClock


def test_while_cut_off_the_run_goes_on_at_the_ratio_last_seen() -> None:
    clock = TokenClock()
    clock.observe(run_tokens=1000, own_tokens=100)
    clock.observe(run_tokens=1400, own_tokens=200)
    # Ratio: half of 1 (before any sample) and half of 400/100.
    assert clock.estimate(own_tokens=300) == 1400 + 2.5 * 100


def test_it_never_falls_between_reports() -> None:
    clock = TokenClock()
    clock.observe(run_tokens=0, own_tokens=0)
    clock.observe(run_tokens=400, own_tokens=100)
    ahead = clock.estimate(own_tokens=200)
    clock.observe(run_tokens=450, own_tokens=200)
    assert clock.estimate(own_tokens=200) == ahead


def test_it_goes_back_where_the_server_went_back_to_a_snapshot() -> None:
    clock = TokenClock()
    clock.observe(run_tokens=1000, own_tokens=100)
    clock.observe(run_tokens=600, own_tokens=150)
    assert clock.estimate(own_tokens=150) == 600


def test_before_any_word_of_the_server_nothing_is_trained() -> None:
    assert TokenClock().estimate(own_tokens=500) == 0.0
