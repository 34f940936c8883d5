"""Deadlines and closing decisions, with numbers worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fragments.records import ContributionKey, Phase, Version
from fragments.runspec import ClosingSettings
from outer_server.core import close
from outer_server.core.close import GRANULARITY_S, Verdict
from outer_server.core.state import (
    Averages,
    ContributionMeta,
    FragmentState,
    Round,
    RunState,
    Timing,
    new_state,
)
from tests.support.records import learner_record
from tests.support.tiny import tiny_spec

KNOWN = Timing(mean_s=1.0, deviation_s=0.25, samples=9)


def test_deadlines_are_smoothed_as_in_rfc_6298() -> None:
    timing = close.observe(Timing(), 2.0)
    assert (timing.mean_s, timing.deviation_s) == (2.0, 1.0)
    timing = close.observe(timing, 4.0)
    # deviation = 3/4*1 + 1/4*|2-4| = 1.25; mean = 7/8*2 + 1/8*4 = 2.25.
    assert (timing.mean_s, timing.deviation_s) == (2.25, 1.25)
    assert close.deadline_s(timing) == 2.25 + 4 * 1.25 + GRANULARITY_S
    assert close.deadline_s(Timing()) == math.inf


def _meta(learner: str, base: int = 0) -> ContributionMeta:
    return ContributionMeta(ContributionKey(learner, 0, Version(1, base)), 4, 64, 0, 4)


def _state(
    *, quorum: int, timings: dict[str, Timing], answered: list[str], **spec: object
) -> tuple[RunState, Round]:
    state = new_state(tiny_spec(quorum=quorum, **spec), ["", ""], generation=1)
    round_ = Round(
        fragment=0,
        version=0,
        opened_at_s=10.0,
        opened_at_step=4,
        asked=tuple(timings),
        answered=frozenset(answered),
    )
    fragment = FragmentState(round=round_, arrived=tuple(_meta(name) for name in answered))
    learners = {name: learner_record(name, timing=timing) for name, timing in timings.items()}
    return replace(state, learners=learners).with_fragment(0, fragment), round_


def _verdict(state: RunState, round_: Round, now_s: float, *, over: bool = False) -> Verdict:
    return close.decide(state, round_, now_s, bound_reached=over).verdict


def test_a_round_closes_once_every_asked_learner_has_answered() -> None:
    timings = {"a": KNOWN, "b": KNOWN}
    assert _verdict(*_state(quorum=2, timings=timings, answered=["a", "b"]), 10.0) is Verdict.CLOSE


def test_it_waits_for_a_missing_learner_up_to_that_learners_own_deadline() -> None:
    timings = {"a": KNOWN, "b": KNOWN}
    state, round_ = _state(quorum=1, timings=timings, answered=["a"])
    deadline_s = 10.0 + 1.0 + 4 * 0.25 + GRANULARITY_S
    decision = close.decide(state, round_, 10.5, bound_reached=False)
    assert decision.verdict is Verdict.WAIT
    assert decision.look_again_s == deadline_s
    assert _verdict(state, round_, deadline_s) is Verdict.CLOSE


@pytest.mark.parametrize(("missed", "verdict"), [(2, Verdict.WAIT), (3, Verdict.CLOSE)])
def test_nobody_waits_for_one_that_missed_three_in_a_row(missed: int, verdict: Verdict) -> None:
    timings = {"a": KNOWN, "b": replace(KNOWN, missed_in_a_row=missed)}
    assert _verdict(*_state(quorum=1, timings=timings, answered=["a"]), 10.1) is verdict


def test_an_answer_in_time_makes_a_learner_worth_waiting_for_again() -> None:
    ignored = replace(KNOWN, missed_in_a_row=7)
    assert close.observe(ignored, 1.0).missed_in_a_row == 0
    assert close.observe(ignored, 2.0, longest_s=2.0).missed_in_a_row == 0
    slow = close.observe(ignored, 2.1, longest_s=2.0)
    assert slow.missed_in_a_row == 7
    assert slow.samples == KNOWN.samples + 1


def test_a_newcomer_without_samples_is_waited_for_up_to_the_bound() -> None:
    state, round_ = _state(quorum=1, timings={"a": KNOWN, "b": Timing()}, answered=["a"])
    assert _verdict(state, round_, 1e9) is Verdict.WAIT
    assert _verdict(state, round_, 11.0, over=True) is Verdict.CLOSE


def test_below_the_quorum_no_deadline_closes_a_round() -> None:
    timings = {"a": KNOWN, "b": KNOWN, "c": KNOWN}
    state, round_ = _state(quorum=2, timings=timings, answered=["a"])
    assert _verdict(state, round_, 1e9, over=True) is Verdict.WAIT


def test_the_dead_are_not_waited_for_and_what_they_sent_counts() -> None:
    timings = {"a": KNOWN, "b": KNOWN}
    state, round_ = _state(quorum=2, timings=timings, answered=["a"])
    gone = replace(state.learners["b"], live=False)
    assert _verdict(state.with_learner(gone), round_, 10.0) is Verdict.CLOSE
    sender_gone = replace(state.learners["a"], live=False)
    left = state.with_learner(gone).with_learner(sender_gone)
    assert _verdict(left, round_, 10.0) is Verdict.CLOSE


def test_a_round_that_everyone_declined_is_abandoned() -> None:
    state, round_ = _state(quorum=1, timings={"a": KNOWN}, answered=[])
    assert _verdict(state, replace(round_, declined=frozenset("a")), 10.0) is Verdict.ABANDON


def test_the_papers_grace_at_and_over_its_bounds() -> None:
    closing = ClosingSettings(rule="paper", gamma=0.5, tau_steps=4)
    # 0.5 * (4*1.0 - (1.5 + 0.5)) = 1.0
    assert close.paper_grace_s(Averages(1.0, 1.5, 0.5), closing) == 1.0
    # Collecting and sending take as long as the overlap, or longer: no grace.
    assert close.paper_grace_s(Averages(1.0, 3.5, 0.5), closing) == 0.0
    assert close.paper_grace_s(Averages(1.0, 9.0, 0.5), closing) == 0.0
    no_grace = ClosingSettings(rule="paper", gamma=0.0, tau_steps=4)
    assert close.paper_grace_s(Averages(1.0, 0.0, 0.0), no_grace) == 0.0


def test_with_the_papers_rule_a_round_closes_a_grace_after_the_quorum() -> None:
    paper = {"rule": "paper", "gamma": 0.5, "tau_steps": 4}
    timings = {"a": KNOWN, "b": KNOWN}
    state, round_ = _state(quorum=1, timings=timings, answered=["a"], closing=paper)
    state = replace(state, averages=Averages(step_s=1.0, quorum_s=1.5, sync_s=0.5))
    round_ = replace(round_, quorum_at_s=11.5)
    assert close.decide(state, round_, 12.0, bound_reached=False).look_again_s == 12.5
    assert _verdict(state, round_, 12.5) is Verdict.CLOSE


@pytest.mark.parametrize(
    "closing", [{}, {"rule": "paper", "gamma": 0.0}, {"rule": "paper", "tau_steps": 4}]
)
@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.CLOSING])
@pytest.mark.parametrize("over", [False, True])
def test_a_round_with_only_older_contributions_does_not_close(
    closing: dict[str, object], phase: Phase, over: bool
) -> None:
    """Fragment 0 is at version 3; a and b answered on version 2, once that round had closed."""
    ignored = replace(KNOWN, missed_in_a_row=3)
    timings = {"a": ignored, "b": ignored, "c": ignored}
    state, round_ = _state(quorum=1, timings=timings, answered=[], closing=closing)
    round_ = replace(round_, version=3)
    carried = (_meta("a", base=2), _meta("b", base=2))
    state = replace(state, phase=phase).with_fragment(
        0, FragmentState(version=3, round=round_, arrived=carried)
    )
    assert _verdict(state, round_, 1e9, over=over) is Verdict.WAIT
    # Nor once nobody is missing: it ends without a version, and they wait for the next.
    nobody = replace(round_, declined=frozenset("abc"))
    assert _verdict(state, nobody, 1e9, over=over) is Verdict.ABANDON
    # One answer on the current version closes it, and an abandoned round's counts as well.
    fresh = replace(state.fragments[0], arrived=(*carried, _meta("c", base=3)))
    assert _verdict(state.with_fragment(0, fresh), nobody, 1e9, over=over) is Verdict.CLOSE
    assert _verdict(state.with_fragment(0, fresh), round_, 1e9, over=True) is Verdict.CLOSE
