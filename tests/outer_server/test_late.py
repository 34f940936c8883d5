"""Contributions that come late or on an old version."""

from __future__ import annotations

from dataclasses import replace

from fragments.records import (
    Ask,
    ContributionKey,
    Receipt,
    Refusal,
    RefusalCode,
    Version,
)
from outer_server.core.events import (
    Note,
)
from outer_server.core.state import (
    RoundStage,
)
from tests.support.scheduled import Run


def test_a_late_contribution_joins_the_next_round_of_its_fragment() -> None:
    run = Run()
    run.trained("a", "b")
    run.step("b", 1)
    run.step("a", 2)
    run.contribute("a", 1, base=0, asked=0)
    run.step("a", 4)  # H/2 steps after opening: the longest wait is over
    run.finish_merge()
    late = run.contribute("b", 1, base=0, asked=0)
    assert isinstance(late, Receipt)
    assert late.late
    run.adopt("a", 1)
    run.step("a", 6)
    run.contribute("a", 1, base=1, asked=1)
    order = run.orders[-1]
    assert [p.learner for p in order.participants] == ["a", "b"]
    assert run.state.learners["b"].tally.contributions_late == 1


def test_a_carried_over_answer_does_not_close_the_next_round_at_its_opening() -> None:
    run = Run(closing={"rule": "paper", "gamma": 0.0})
    run.trained("a", "b")
    run.step("b", 1)
    run.step("a", 2)
    run.contribute("a", 1, base=0, asked=0)  # the first answer closes the round
    run.finish_merge()
    run.contribute("b", 1, base=0, asked=0)
    run.adopt("a", 1)
    run.step("a", 6)
    assert run.orders == [], "nobody has answered the new round yet"
    round_ = run.state.fragments[1].round
    assert round_ is not None
    assert round_.quorum_at_s is None
    run.contribute("a", 1, base=1, asked=1)
    (order,) = run.orders
    assert [str(meta.key.base_version) for meta in order.contributions] == ["1.1", "1.0"]


def test_no_round_opens_for_carried_over_answers_alone() -> None:
    run = Run()
    run.trained("a", "b")
    run.step("b", 1)
    run.step("a", 2)
    run.contribute("a", 1, base=0, asked=0)
    run.step("a", 4)
    run.finish_merge()
    run.contribute("b", 1, base=0, asked=0)
    run.step("a", 6)  # neither has adopted version 1: nobody can be asked
    assert run.state.fragments[1].round is None
    assert len(run.state.fragments[1].arrived) == 1


def test_answers_that_are_always_late_do_not_lengthen_the_rounds() -> None:
    """H = 4, so a round waits two steps of the clock at the longest; a step takes a second."""
    run = Run()
    run.trained("a", "b")
    run.step("b", 1)
    waits: list[int] = []
    pending: list[tuple[int, tuple[str, int, int, int]]] = []
    for step in range(1, 33):
        run.now_s += 1.0
        run.step("a", step)
        run.step("b", step + 1)
        for name, ask in run.asks:
            base = run.state.learners[str(name)].bases[ask.fragment].version
            if name == "a":
                run.contribute("a", ask.fragment, base, ask.version.number)
            else:
                pending.append((step + 3, ("b", ask.fragment, base, ask.version.number)))
        run.asks.clear()
        for due, answer in list(pending):
            if due == step:
                pending.remove((due, answer))
                run.contribute(*answer)
        waits.append(sum(r.stage is RoundStage.COLLECTING for r in run.state.open_rounds))
        while run.orders:
            fragment = run.orders[0].fragment
            run.finish_merge()
            run.adopt("a", fragment)
            run.adopt("b", fragment)
    # Three rounds of patience, and none after them.
    assert sum(waits[:10]) >= 3
    assert sum(waits[16:]) == 0
    assert run.state.learners["b"].tally.contributions_late > 3


def test_too_stale_is_refused_and_counted() -> None:
    run = Run(staleness_bound=1)
    run.trained("a", "b")
    run.step("b", 1)
    fragments = tuple(replace(f, version=2) for f in run.state.fragments)
    run.state = replace(run.state, fragments=fragments)
    refusal = run.contribute("b", 1, base=0, asked=0)
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.STALE
    assert run.state.learners["b"].tally.contributions_refused == 1


def test_what_is_too_stale_at_the_closing_is_told_and_counted() -> None:
    """It came within the bound, while the version that put it out of it was being made."""
    run = Run(staleness_bound=0)
    run.trained("a", "b")
    run.step("b", 1)
    run.step("a", 2)
    run.contribute("a", 1, base=0, asked=0)
    run.step("a", 4)  # the longest wait is over: the merge begins without b
    assert isinstance(run.contribute("b", 1, base=0, asked=0), Receipt)
    run.finish_merge()
    run.adopt("a", 1)
    run.step("a", 6)
    run.contribute("a", 1, base=1, asked=1)
    assert [p.learner for p in run.orders[-1].participants] == ["a"]
    assert run.refusals == [
        Note(
            "contribution_refused",
            "base 0 is 1 versions behind, the bound is 0",
            (("learner", "b"), ("fragment", 1)),
        )
    ]
    assert run.state.learners["b"].tally.contributions_refused == 1
    assert run.discarded[-1] == ContributionKey("b", 1, Version(1, 0))


def test_late_ones_are_dropped_where_the_run_drops_them() -> None:
    run = Run(late="drop")
    run.trained("a", "b")
    run.step("b", 1)
    run.step("a", 2)
    run.contribute("a", 1, base=0, asked=0)
    run.step("a", 4)
    run.finish_merge()
    first = run.contribute("b", 1, base=0, asked=0)
    assert isinstance(first, Refusal)
    assert first.code is RefusalCode.STALE
    # Whose receipt was lost hears the same again, and it counts once.
    assert run.contribute("b", 1, base=0, asked=0) == first
    other = run.contribute("b", 1, base=0, asked=0, text="y")
    assert isinstance(other, Refusal)
    assert other.code is RefusalCode.CONSUMED
    tally = run.state.learners["b"].tally
    assert (tally.contributions_late, tally.contributions_refused) == (1, 2)
    assert run.state.tokens_pushed == 32, "that of a"
    run.adopt("a", 1)
    run.step("a", 6)
    # Its base is consumed: b is not asked before it has adopted.
    assert run.asks[-1] == ("a", Ask(1, Version(1, 1)))
    run.contribute("a", 1, base=1, asked=1)
    assert [meta.key.learner for meta in run.orders[-1].contributions] == ["a"]
    # What comes in time is taken as ever.
    run.finish_merge()
    run.adopt("a", 1)
    run.adopt("b", 1)
    run.step("b", 2)
    run.step("a", 10)
    assert isinstance(run.contribute("b", 1, base=2, asked=2), Receipt)
