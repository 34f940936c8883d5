"""Joining, leaving, returning: who may speak, and what of it counts."""

from __future__ import annotations

from fragments.records import (
    Ask,
    ContributionKey,
    HeldBase,
    Receipt,
    Refusal,
    RefusalCode,
    Report,
    Version,
    Welcome,
)
from outer_server.core.events import (
    Contributed,
    Leave,
    Reported,
    Tick,
)
from outer_server.core.resume import resume
from outer_server.core.state import (
    ContributionMeta,
)
from tests.support.scheduled import Run


def test_a_newer_process_of_a_name_fences_the_older_off() -> None:
    run = Run()
    run.trained("a")
    old = run.token("a")
    assert isinstance(run.join("a", incarnation="2"), Welcome)
    key = ContributionKey("a", 0, Version(1, 0))
    meta = ContributionMeta(key, 1, 16, 0, 1)
    refusal = run.tell(Contributed("a", old, meta, Version(1, 0), "x"))
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.FENCED


def test_a_process_that_was_replaced_does_not_come_back_in_its_turn() -> None:
    """It was lost first, and so heard only that it should join again."""
    run = Run(lease_ttl_s=10.0)
    run.trained("a", "b")
    run.now_s = 9.0
    run.step("b", 1)
    run.now_s = 10.0
    run.tell(Tick())
    assert not run.state.learners["a"].live
    assert isinstance(run.join("a", incarnation="2"), Welcome)
    again = run.join("a", incarnation="1")
    assert isinstance(again, Refusal)
    assert again.code is RefusalCode.FENCED
    assert run.state.learners["a"].incarnation == "2"
    # The newest one may come back as often as it likes.
    assert isinstance(run.join("a", incarnation="2"), Welcome)


def test_a_returned_learner_does_not_get_its_consumed_base_counted_again() -> None:
    run = Run()
    run.trained("a", "b")
    run.step("a", 2)
    run.contribute("a", 1, base=0, asked=0, text="before")
    welcome = run.join("a", incarnation="2")
    assert isinstance(welcome, Welcome)
    assert welcome.consumed == (-1, 0)
    assert welcome.cursor == 2
    run.adopt("a", 1)
    run.step("a", 2)
    refusal = run.contribute("a", 1, base=0, asked=0, text="after")
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.CONSUMED


def test_mismatches_are_refused_with_a_sentence() -> None:
    run = Run()
    for hello in (
        {"protocol_version": 99},
        {"run_id": "other"},
        {"layout_digest": "other"},
        {"generation_seen": 5},
        {"run_id": "x" * 4_000_000},
        {"cursor": 2**64 - 1},
    ):
        refusal = run.join("a", **hello)
        assert isinstance(refusal, Refusal)
        assert refusal.code is RefusalCode.MISMATCH
        assert len(refusal.reason) < 300
    assert run.state.learners == {}


def test_joins_beyond_max_learners_are_refused() -> None:
    run = Run(max_learners=1)
    run.join("a")
    refusal = run.join("b")
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.FULL


def test_silence_beyond_the_lease_is_a_loss_and_the_others_go_on() -> None:
    run = Run(lease_ttl_s=10.0)
    run.trained("a", "b")
    run.step("b", 1)
    run.step("a", 2)
    run.contribute("a", 1, base=0, asked=0)
    run.now_s = 9.0
    run.step("a", 3)
    run.now_s = 10.0
    run.tell(Tick())
    assert not run.state.learners["b"].live
    assert run.orders, "the round no longer waits for the lost one"


def test_steps_made_while_away_count_as_tokens_but_do_not_push_the_clock() -> None:
    run = Run()
    run.trained("a", "b")
    run.step("a", 4)
    run.tell(Leave("a", run.token("a"), "cut off"))
    run.join("a")  # the same process, which has trained on
    far = Report(step=244, tokens=16 * 244, cursor=244)
    run.tell(Reported("a", run.token("a"), far))
    assert run.state.tokens_trained == 16 * 244
    assert run.state.global_step == 5
    assert run.state.learners["a"].report.step == 244


def test_what_a_rollback_lost_counts_for_nothing() -> None:
    run = Run()
    run.trained("a")
    run.step("a", 10)
    snapshot = run.state
    run.step("a", 100)
    assert run.state.tokens_trained == 1600
    run.state = resume(snapshot, generation=2, epoch=2)
    run.join("a")  # the same process, which stands at step 100
    run.tell(Reported("a", run.token("a"), Report(step=101, tokens=1616, cursor=101)))
    assert run.state.tokens_trained == 160, "only where it counts from"
    run.step("a", 103)
    record = run.state.learners["a"]
    assert run.state.tokens_trained == 160 + 2 * 16
    assert record.tally.steps + record.report.step == 12
    # A new process of the name counts from nothing.
    run.state = resume(snapshot, generation=3, epoch=3)
    run.join("a", incarnation="2")
    run.step("a", 1)
    assert run.state.tokens_trained == 160 + 16


def test_a_newcomer_to_a_full_run_takes_the_place_of_a_name_that_is_gone() -> None:
    run = Run(max_learners=2)
    run.trained("a", "b")
    run.step("b", 7)
    refusal = run.join("c")
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.FULL
    shard = run.state.learners["b"].shard_index
    run.tell(Leave("b", run.token("b"), "gone"))
    welcome = run.join("c")
    assert isinstance(welcome, Welcome)
    assert (welcome.shard_index, welcome.cursor) == (shard, 7)
    assert set(run.state.learners) == {"a", "c"}


def _merged_and_retired() -> Run:
    """b's answer on base 0 is merged, its receipt lost; c takes its place, then a leaves."""
    run = Run(max_learners=2)
    run.trained("a", "b")
    run.step("b", 2)
    run.step("a", 2)
    run.contribute("a", 1, base=0, asked=0)
    run.contribute("b", 1, base=0, asked=0)
    run.finish_merge()
    run.tell(Leave("b", run.token("b"), "cut"))
    run.join("c")
    run.tell(Leave("a", run.token("a"), "gone"))
    return run


def test_nothing_counts_twice_of_a_process_whose_name_was_retired() -> None:
    run = _merged_and_retired()
    assert run.state.tokens_trained == 2 * 32
    held = tuple(HeldBase(fragment, Version(1, 0), 2, 32) for fragment in (0, 1))
    welcome = run.join("b", bases=held, cursor=2)
    assert isinstance(welcome, Welcome)
    assert welcome.consumed == (-1, 0)
    again = run.contribute("b", 1, base=0, asked=0)
    assert isinstance(again, Refusal)
    assert again.code is RefusalCode.CONSUMED
    # Its counters go on from where they were: 48 tokens so far, of which 32 are counted.
    token = run.token("b")
    run.tell(Reported("b", token, Report(step=3, tokens=48, cursor=3)))
    assert run.state.tokens_trained == 64
    run.tell(Reported("b", token, Report(step=4, tokens=64, cursor=4)))
    assert run.state.tokens_trained == 80
    record = run.state.learners["b"]
    assert record.tally.tokens + record.report.tokens == 16
    # A base that no closed round has superseded cannot have been counted.
    assert isinstance(run.contribute("b", 0, base=0, asked=0), Receipt)


def test_a_new_process_of_a_retired_name_counts_from_nothing() -> None:
    run = _merged_and_retired()
    run.join("b", incarnation="2")
    for fragment in range(2):
        run.adopt("b", fragment)
    run.step("b", 2)
    assert run.state.tokens_trained == 2 * 32 + 32
    run.step("b", 8)
    assert ("b", Ask(1, Version(1, 1))) in run.asks


def test_a_place_is_not_taken_while_something_of_its_name_waits_to_be_merged() -> None:
    run = Run(max_learners=2, quorum=2)
    run.trained("a", "b")
    run.step("b", 1)
    run.step("a", 2)
    run.step("b", 2)
    run.contribute("b", 1, base=0, asked=0)
    run.tell(Leave("b", run.token("b"), "gone"))
    # With b gone the round closes on its answer once a has answered; before that it waits.
    assert isinstance(run.join("c"), Refusal)


def test_fencing_tokens_rise_over_a_rollback() -> None:
    run = Run()
    run.join("a")
    snapshot = run.state
    run.join("a", incarnation="2")
    forgotten = run.token("a")
    run.state = resume(snapshot, generation=2, epoch=2)
    run.join("a", incarnation="3")
    assert run.token("a") > forgotten
