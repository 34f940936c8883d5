"""The account of training data, from tapes written by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fragments.records import (
    ContributionKey,
    Receipt,
    Refusal,
    Version,
    Welcome,
)
from outer_server.core.events import (
    Contributed,
    Denied,
    Discard,
    Join,
    Leave,
    RollBack,
    Started,
)
from outer_server.core.intervals import Account, Gap, Interval, Miscount, Reason, account
from outer_server.store.snapshot import is_same
from tests.support.taped import STATE, Taped


def _of(found: Account) -> list[tuple[int, int, Reason]]:
    return [(gap.start, gap.stop, gap.reason) for gap in found.gaps if gap.fragment == 1]


def test_a_gap_between_two_answers_of_one_process_is_overlap() -> None:
    run = Taped()
    run.trained("a")
    run.step("a", 2)
    run.push("a", 0, 2)
    run.merge_all()
    run.adopt("a", 1)
    run.step("a", 6)
    run.push("a", 3, 6)
    run.merge_all()
    found = run.account()
    assert found.merged == (
        Interval("a", 1, 0, 0, 2, Version(1, 0)),
        Interval("a", 1, 0, 3, 6, Version(1, 1)),
    )
    assert _of(found) == [(2, 3, Reason.OVERLAP)]
    assert not found.overlaps


def test_a_push_that_outruns_its_report_is_not_trained_again_by_the_next_process() -> None:
    run = Taped()
    run.trained("a")
    run.step("a", 2)
    # Its third step is in the answer; the report of it died with the process.
    assert isinstance(run.push("a", 0, 3), Receipt)
    welcome = run.join("a", incarnation="2")
    assert isinstance(welcome, Welcome)
    assert welcome.cursor == 3
    run.merge_all()
    for fragment in range(2):
        run.adopt("a", fragment)
    run.step("a", 6)
    run.push("a", 3, 9)
    run.merge_all()
    found = run.account()
    assert [(i.start, i.stop) for i in found.merged] == [(0, 3), (3, 9)]
    assert not found.overlaps


def test_batches_that_came_twice_are_found() -> None:
    run = Taped()
    run.trained("a")
    run.step("a", 2)
    run.push("a", 0, 3)
    run.merge_all()
    run.adopt("a", 1)
    run.step("a", 8)
    run.push("a", 2, 8)
    run.merge_all()
    one, two = run.account().merged
    assert run.account().overlaps == ((one, two),)


def test_the_hole_that_a_checkpoint_leaves_is_no_part_of_what_is_sent() -> None:
    run = Taped()
    run.trained("a")
    run.step("a", 20)
    # It died at 20 and had a checkpoint of 12; base 0 is as it was, and nothing of it was sent.
    welcome = run.join("a", incarnation="2", cursor=12)
    assert isinstance(welcome, Welcome)
    assert welcome.cursor == 20
    for fragment in range(2):
        run.adopt("a", fragment)
    run.step("a", 8)
    run.push("a", 0, 25, steps=17)
    run.merge_all()
    found = run.account()
    assert [(i.start, i.stop) for i in found.merged] == [(0, 12), (20, 25)]
    assert _of(found) == [(12, 20, Reason.CRASH)]
    assert not found.miscounts


@pytest.mark.parametrize("steps_since", [0, 5])
def test_an_account_that_begins_after_a_checkpoints_hole_knows_of_it(steps_since: int) -> None:
    run = Taped()
    run.trained("a")
    run.step("a", 20)
    run.join("a", incarnation="2", cursor=12)
    for fragment in range(2):
        run.adopt("a", fragment)
    begin, seen = run.snapshot(), len(run.tape)
    run.step("a", 8)
    run.push("a", 0, 20 + steps_since, steps=12 + steps_since)
    answered, then = run.snapshot(), len(run.tape)
    # Another process, from a checkpoint of before that answer, which waits: it holds what it held.
    run.join("a", incarnation="3", cursor=14)
    third, last = run.snapshot(), len(run.tape)
    run.merge_all()
    whole = run.account()
    assert [(i.start, i.stop) for i in whole.merged][:1] == [(0, 12)]
    assert sum(i.stop - i.start for i in whole.merged) == 12 + steps_since
    for state, taped in ((begin, seen), (answered, then), (third, last)):
        found = account(run.tape[taped:], state)
        assert found.merged == whole.merged
        assert Gap(1, 0, 12, 20, Reason.CRASH) in found.gaps
        assert not found.miscounts


def test_an_account_that_begins_in_mid_run_says_nothing_of_what_it_cannot_know() -> None:
    run = Taped(min_learners=2, quorum=2)
    run.trained("a", "b")
    run.step("b", 2)
    run.step("a", 2)
    run.push("a", 0, 2)
    # It died at 6, which is known as long as the tape goes back to it.
    run.step("a", 6)
    run.join("a", incarnation="2")
    begin, seen = run.snapshot(), len(run.tape)
    for fragment in range(2):
        run.adopt("a", fragment)
    run.step("a", 2)
    found = account(run.tape[seen:], begin)
    assert _of(run.account())[:2] == [(0, 2, Reason.WAITING), (2, 6, Reason.CRASH)]
    assert _of(found)[:1] == [(0, 2, Reason.WAITING)]
    assert (0, 6) in found.begins
    assert not [gap for gap in found.gaps if gap.shard == 0 and 2 <= gap.start < 6]


def test_a_retry_that_is_refused_takes_nothing_back() -> None:
    run = Taped(min_learners=2, quorum=2)
    run.trained("a", "b")
    run.step("b", 2)
    run.step("a", 2)
    run.push("a", 0, 2)
    retry = run.tape[-1][0]
    assert isinstance(retry, Contributed)
    run.tell(Leave("a", run.token("a"), "it hangs"))
    assert isinstance(run.tell(retry), Refusal)
    assert (0, 2, Reason.WAITING) in _of(run.account())
    run.join("a", incarnation="1", cursor=2)
    for fragment in range(2):
        run.adopt("a", fragment)
    run.push("b", 0, 2)
    run.merge_all()
    begin, seen = run.snapshot(), len(run.tape)
    run.tell(Leave("a", run.token("a"), "it hangs"))
    run.tell(replace(retry, token=run.token("a")))
    assert not _of(account(run.tape[seen:], begin))


def test_a_process_that_repeats_what_it_was_to_pass_over_is_found() -> None:
    run = Taped()
    run.trained("a")
    run.exchange("a")
    # A new process, and its data begins anew, whatever it was told.
    run.back("a", "2")
    run.step("a", 4)
    run.push("a", 1, 2)
    run.merge_all()
    found = run.account()
    assert [(one.stop, other.start) for one, other in found.overlaps] == [(2, 1)]
    assert not found.miscounts


def test_a_checkpoint_of_before_the_first_batch_leaves_a_hole_too() -> None:
    run = Taped()
    run.trained("a")
    run.step("a", 3)
    run.back("a", "2", cursor=0)
    run.step("a", 5)
    run.push("a", 0, 5, steps=2)
    run.merge_all()
    found = run.account()
    assert [(i.start, i.stop) for i in found.merged] == [(3, 5)]
    assert _of(found) == [(0, 3, Reason.CRASH)]
    assert not found.miscounts


def test_a_contribution_that_says_more_than_it_holds_is_found() -> None:
    run = Taped()
    run.trained("a")
    run.step("a", 4)
    run.push("a", 0, 4, steps=7)
    key = ContributionKey("a", 1, Version(1, 0))
    assert run.account().miscounts == (Miscount(key, 7, 4),)


def test_every_other_reason_has_its_name() -> None:
    run = Taped(late="drop")
    run.trained("a", "b")
    run.step("b", 1)
    run.step("a", 2)
    run.push("a", 0, 2)
    assert Gap(1, 0, 0, 2, Reason.WAITING) in run.account().gaps
    assert Gap(1, 1, 0, 1, Reason.UNSENT) in run.account().gaps
    run.push("b", 0, 1)
    run.merge_all("no finite result")
    found = run.account()
    assert Gap(1, 0, 0, 2, Reason.REFUSED, "no finite result") in found.gaps
    assert Gap(1, 1, 0, 1, Reason.REFUSED, "no finite result") in found.gaps
    # Late, in a run that drops what is late.
    run.adopt("a", 1)
    run.step("a", 4)
    reply = run.push("a", 2, 4)
    assert isinstance(reply, Refusal)
    assert Gap(1, 0, 2, 4, Reason.REFUSED, reply.reason) in run.account().gaps


def test_what_waits_when_the_run_ends_is_left_over() -> None:
    run = Taped()
    run.trained("a")
    run.step("a", 2)
    run.push("a", 0, 2)
    key = ContributionKey("a", 1, Version(1, 0))
    run.tape.append((Leave("a", 1, ""), None, [Discard((key,))]))
    assert Gap(1, 0, 0, 2, Reason.LEFT_OVER, "the run is finished") in run.account().gaps


def test_what_a_rollback_undid_may_come_again() -> None:
    run = Taped()
    run.trained("a")
    birth = run.point("000000")
    run.step("a", 2)
    run.push("a", 0, 2)
    run.merge_all()
    run.roll_back(birth)
    run.back("a", "2", cursor=2)
    assert Gap(1, 0, 0, 2, Reason.ROLLED_BACK, "before epoch 2") in run.account().gaps
    run.step("a", 4)
    run.push("a", 0, 2)
    run.merge_all()
    found = run.account()
    assert [(i.start, i.base) for i in found.merged] == [(0, Version(2, 0))]
    assert not found.overlaps


@pytest.mark.parametrize("then", ["nothing", "restart", "take-over", "other bits", "join"])
def test_a_rollback_undoes_at_once_whatever_comes_next(then: str) -> None:
    run = Taped(min_learners=2, quorum=2)
    run.trained("a", "b")
    birth = run.point("000000")
    run.exchange("a", "b")
    # This waits when the run goes back: it is void too, and not waiting.
    run.step("a", 4)
    run.push("a", 2, 4)
    run.roll_back(birth)
    match then:
        case "restart":
            run.tell(Started(2, 2))
        case "take-over":
            run.tell(Started(1002, 3, (), "it goes on from a copy", keeps=True))
        case "other bits":
            run.tell(Started(2, 3, ("e0", "e0"), "this machine computes other bits"))
        case "join":
            run.back("a", "2", cursor=4)
    found = run.account()
    assert not found.merged
    undone = [(0, 2, "before epoch 2"), (2, 4, "before epoch 2")]
    assert [(g.start, g.stop, g.detail) for g in found.gaps if (g.fragment, g.shard) == (1, 0)] == (
        undone
    )


def test_going_forward_again_brings_back_what_going_back_undid() -> None:
    run = Taped()
    run.trained("a")
    birth = run.point("000000")
    run.exchange("a")
    later = run.point("000001")
    run.roll_back(birth)
    run.back("a", "2", cursor=2)
    run.exchange("a")
    run.roll_back(later)
    run.back("a", "3", cursor=4)
    found = run.account()
    assert found.merged == (Interval("a", 1, 0, 0, 2, Version(1, 0)),)
    assert _of(found) == [(2, 4, Reason.ROLLED_BACK)]
    assert run.state.tokens_merged == 32
    # And what has come since goes on from there.
    run.exchange("a")
    run.roll_back(birth)
    found = run.account()
    assert not found.merged
    assert {gap.detail for gap in found.gaps if gap.fragment == 1} == {
        "before epoch 3",
        "before epoch 4",
    }


def test_a_denied_rollback_undoes_nothing() -> None:
    run = Taped()
    run.trained("a")
    birth = run.point("000000")
    run.exchange("a")
    assert isinstance(run.tell(RollBack(birth, 1, "that epoch is on already")), Denied)
    assert [(i.start, i.stop) for i in run.account().merged] == [(0, 2)]


def test_a_tape_that_begins_in_mid_run_begins_with_its_state() -> None:
    run = Taped()
    run.trained("a")
    run.step("a", 2)
    run.push("a", 0, 2)
    begin, seen = run.state, len(run.tape)
    run.merge_all()
    found = account(run.tape[seen:], begin)
    assert found.merged == (Interval("a", 1, 0, 0, 2, Version(1, 0)),)


def test_who_takes_a_place_goes_on_with_its_data_and_repeats_nothing() -> None:
    run = Taped(max_learners=2)
    run.trained("a", "b")
    run.step("b", 2)
    run.step("a", 2)
    run.push("a", 0, 2)
    run.push("b", 0, 2)
    run.merge_all()
    run.step("b", 7)
    run.tell(Leave("b", run.token("b"), "gone"))
    welcome = run.join("c")
    assert isinstance(welcome, Welcome)
    assert (welcome.shard_index, welcome.cursor) == (1, 7)
    for fragment in range(2):
        run.adopt("c", fragment)
    run.step("c", 3)
    run.step("a", 6)
    run.push("c", 7, 10)
    run.push("a", 2, 6)
    run.merge_all()
    found = run.account()
    assert [(i.learner, i.start, i.stop) for i in found.merged if i.shard == 1] == [
        ("b", 0, 2),
        ("c", 7, 10),
    ]
    crashed = [gap for gap in found.gaps if gap.shard == 1 and gap.fragment == 1]
    assert crashed == [Gap(1, 1, 2, 7, Reason.CRASH)]


def test_joins_of_evaluators_are_none_of_training() -> None:
    run = Taped()
    assert not account([(event, reply, ()) for event, reply, _ in run.tape]).merged
    assert isinstance(run.join("a"), Welcome)
    assert isinstance(run.tape[-1][0], Join)


def test_a_snapshot_of_before_holes_were_noted_is_read_and_is_the_same() -> None:
    run = Taped()
    run.trained("a")
    run.step("a", 20)
    run.back("a", "2", cursor=12)
    document = json.loads(json.dumps(STATE.dump_python(run.state, mode="json")))
    assert document["learners"]["a"].pop("passed_over") == [[12, 20]]
    older = STATE.validate_python(document)
    assert older.learners["a"].passed_over == ()
    assert is_same(older, run.state)
    assert not is_same(older, replace(run.state, global_step=99))
