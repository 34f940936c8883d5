"""The account of training data, from tapes written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from fragments.records import (
    ContributionKey,
    Receipt,
    Refusal,
    Version,
    Welcome,
)
from outer_server.core.events import Contributed, Discard, Effect, Event, Join, Leave, Reply
from outer_server.core.intervals import Account, Gap, Interval, Miscount, Reason, account
from outer_server.core.resume import resume
from outer_server.core.scheduler import handle
from outer_server.core.state import ContributionMeta
from tests.support.scheduled import LAYOUT, Run


class Taped(Run):
    """A scheduler with its tape; a contribution says where it begins and ends."""

    def __init__(self, **spec: object) -> None:
        super().__init__(**spec)
        self.tape: list[tuple[Event, Reply, Sequence[Effect]]] = []

    def tell(self, event: Event) -> Reply:
        outcome = handle(self.state, event, self.now_s, LAYOUT)
        self.tape.append((event, outcome.reply, outcome.effects))
        return super().tell(event)

    def push(self, name: str, start: int, stop: int, steps: int | None = None) -> Reply:
        """An answer for fragment 1 on its newest version."""
        version = Version(self.state.epoch, self.state.fragments[1].version)
        key = ContributionKey(name, 1, version)
        count = stop - start if steps is None else steps
        meta = ContributionMeta(key, count, 16 * count, start, stop)
        return self.tell(Contributed(name, self.token(name), meta, version, f"{start}-{stop}"))

    def merge_all(self, refused: str | None = None) -> None:
        while self.orders:
            self.finish_merge(refused)

    def account(self) -> Account:
        return account(self.tape)


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
    run.step("a", 2)
    before = run.state
    run.push("a", 0, 2)
    run.merge_all()
    run.state = resume(before, generation=2, epoch=2)
    run.join("a", incarnation="2")
    for fragment in range(2):
        run.adopt("a", fragment)
    assert Gap(1, 0, 0, 2, Reason.ROLLED_BACK, "before epoch 2") in run.account().gaps
    run.step("a", 4)
    run.push("a", 0, 2)
    run.merge_all()
    found = run.account()
    assert [(i.start, i.base) for i in found.merged] == [(0, Version(2, 0))]
    assert not found.overlaps


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
