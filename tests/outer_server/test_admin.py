"""What an operator may do: the rules, on a scheduler without a server."""

from __future__ import annotations

from dataclasses import replace

from fragments.records import (
    Answered,
    Goodbye,
    Phase,
    Progress,
    Receipt,
    Refusal,
    RefusalCode,
    Welcome,
)
from outer_server.core.events import (
    Change,
    Denied,
    Disconnect,
    Drain,
    Evict,
    Hold,
    Merged,
    Point,
    Release,
    Reply,
    RollBack,
    Send,
    Tick,
)
from outer_server.core.resume import resume
from outer_server.core.scheduler import handle
from outer_server.core.state import SlotClock
from tests.support.scheduled import LAYOUT, Run


def _sentence(reply: Reply) -> str:
    assert isinstance(reply, Answered)
    return reply.sentence


def _is_new(reply: Reply) -> bool:
    assert isinstance(reply, Answered)
    return reply.changed


def _denied(reply: Reply) -> str:
    assert isinstance(reply, Denied)
    return reply.reason


def _training() -> Run:
    """Two learners that train; one has answered the open round of fragment 1, one is asked."""
    run = Run(sync_interval=4)
    run.trained("a", "b")
    run.step("b", 1)
    run.step("a", 2)
    assert len(run.asks) == 2
    run.contribute("a", 1, 0, 0)
    return run


def test_a_drained_run_ends_its_rounds_and_opens_none() -> None:
    run = _training()
    reply = run.tell(Hold("a new disk"))
    assert _is_new(reply)
    assert "the one that is open ends by its rules; learners train on" in _sentence(reply)
    assert run.phase() is Phase.DRAINING
    assert "(a new disk)" in run.state.phase_reason
    run.contribute("b", 1, 0, 0)
    run.finish_merge()
    assert run.state.fragments[1].version == 1
    asked = len(run.asks)
    run.step("a", 40)
    assert len(run.asks) == asked
    assert not run.state.open_rounds
    assert isinstance(run.join("c"), Welcome), "training goes on"
    assert not _is_new(run.tell(Hold("again")))
    assert _is_new(run.tell(Release(None, "")))
    assert run.phase() is Phase.TRAINING
    assert not _is_new(run.tell(Release(None, "")))
    run.adopt("a", 1)
    run.step("a", 48)
    assert len(run.asks) > asked


def test_a_drained_run_stays_so_over_a_restart() -> None:
    run = _training()
    run.tell(Hold("why"))
    run.state = resume(run.state, 2, 1)
    assert (run.phase(), "(why)" in run.state.phase_reason) == (Phase.DRAINING, True)
    run.tell(Tick())
    assert run.phase() is Phase.DRAINING
    run.tell(Release(None, ""))
    assert run.phase() is Phase.TRAINING


def test_a_stop_while_drained_parks_what_is_open() -> None:
    run = _training()
    run.tell(Hold(""))
    run.tell(Drain("stopping"))
    run.contribute("b", 1, 0, 0)
    assert not run.orders
    assert isinstance(run.join("c"), Refusal)
    run.tell(Release(None, ""))
    assert not run.orders, "a stop is not undone"
    run.state = resume(run.state, 2, 1)
    run.tell(Tick())
    assert run.phase() is Phase.TRAINING


def test_what_is_over_cannot_be_drained() -> None:
    run = _training()
    for phase, word in ((Phase.CLOSING, "closing lap"), (Phase.FINISHED, "finished")):
        run.state = replace(run.state, phase=phase, closing_until_s=99.0)
        before = run.state
        assert word in _denied(run.tell(Hold("")))
        assert run.state == before


def test_an_evicted_learner_is_told_and_refused_and_what_it_sent_is_merged() -> None:
    run = _training()
    outcome = handle(run.state, Evict("a", "bad data"), run.now_s, LAYOUT)
    (goodbye,) = (e.note for e in outcome.effects if isinstance(e, Disconnect))
    assert isinstance(goodbye, Goodbye)
    assert goodbye.code is RefusalCode.EVICTED
    assert "(bad data)" in goodbye.reason
    reply = run.tell(Evict("a", "bad data"))
    assert "1 contributions that wait are merged" in _sentence(reply)
    for answer in (run.join("a"), run.contribute("a", 0, 0, 0)):
        assert isinstance(answer, Refusal)
        assert answer.code is RefusalCode.EVICTED
        assert "diloco admin release a" in answer.reason
    run.contribute("b", 1, 0, 0)
    assert [p.learner for p in run.orders[0].participants] == ["a", "b"]
    assert not _is_new(run.tell(Evict("a", "bad data")))
    assert _is_new(run.tell(Release("a", "")))
    assert not _is_new(run.tell(Release("a", "")))
    assert isinstance(run.join("a"), Welcome)


def test_what_an_evicted_learner_sent_can_be_dropped_and_sent_again_later() -> None:
    run = _training()
    reply = run.tell(Evict("a", "", drop=True))
    assert "1 contributions that waited are dropped" in _sentence(reply)
    assert [key.learner for key in run.discarded] == ["a"]
    run.tell(Release("a", ""))
    run.join("a")
    run.adopt("a", 1)
    again = run.contribute("a", 1, 0, 0, "other bytes")
    assert isinstance(again, Receipt)
    assert not again.duplicate
    run.contribute("b", 1, 0, 0)
    assert [p.learner for p in run.orders[0].participants] == ["a", "b"]
    assert len(run.orders[0].contributions) == 2


def test_an_eviction_for_a_time_ends_and_begins_anew_after_a_restart() -> None:
    run = _training()
    run.now_s = 100.0
    run.tell(Evict("a", "", for_s=10.0))
    outcome = handle(run.state, Tick(), 105.0, LAYOUT)
    assert outcome.wake_at_s <= 110.0
    run.state = resume(run.state, 2, 1)
    run.now_s = 9.0
    assert isinstance(run.join("a"), Refusal)
    run.now_s = 10.0
    run.tell(Tick())
    assert isinstance(run.join("a"), Welcome)


def test_the_status_says_who_is_evicted_where_learners_are_missing() -> None:
    run = Run(min_learners=2)
    run.trained("a", "b")
    run.tell(Evict("a", ""))
    assert run.phase() is Phase.WAITING
    assert run.state.phase_reason == "1 live learner of at least 2, evicted: a"


def test_nobody_is_evicted_by_a_wrong_name_or_for_no_time() -> None:
    run = _training()
    before = run.state
    assert "there is no 'c' in this run: a, b" in _denied(run.tell(Evict("c", "")))
    assert "no time" in _denied(run.tell(Evict("a", "", for_s=float("inf"))))
    assert run.state == before


def test_changed_settings_count_at_once_and_are_told() -> None:
    run = _training()
    event = Change((("quorum", "2"), ("budget_tokens", "9600")), "more")
    outcome = handle(run.state, event, run.now_s, LAYOUT)
    told = [e.note for e in outcome.effects if isinstance(e, Send)]
    assert [note.budget_tokens for note in told if isinstance(note, Progress)] == [9600]
    assert (
        _sentence(run.tell(event)) == "quorum: 2 instead of 1; budget_tokens: 9600 instead of 6400"
    )
    assert run.state.quorum_effective == 2
    assert not _is_new(run.tell(event))


def test_a_budget_that_is_trained_already_ends_the_run() -> None:
    run = _training()
    assert "the run ends now" in _sentence(run.tell(Change((("budget_tokens", "16"),), "")))
    assert run.phase() is Phase.CLOSING
    assert "closing lap" in _denied(run.tell(Change((("budget_tokens", "99"),), "")))


def test_a_round_is_merged_with_the_settings_of_its_closing() -> None:
    run = _training()
    run.contribute("b", 1, 0, 0)
    run.tell(Change((("outer.learning_rate", "0.1"), ("merge", "average")), ""))
    old = run.orders[0]
    assert old.outer is not None
    assert (old.outer.learning_rate, old.merge) == (0.5, "rda")
    run.finish_merge()
    for name in "ab":
        run.adopt(name, 1)
        run.step(name, 6)
        run.contribute(name, 1, 1, 1)
    new = next(order for order in run.orders if order.fragment == 1)
    assert new.outer is not None
    assert (new.outer.learning_rate, new.merge) == (0.1, "average")


def test_what_cannot_be_set_changes_nothing() -> None:
    run = _training()
    before = run.state
    assert "did you mean quorum" in _denied(run.tell(Change((("quorun", "2"),), "")))
    both = (("quorum", "2"), ("late", "maybe"))
    assert "late 'maybe'" in _denied(run.tell(Change(both, "")))
    assert run.state == before


POINT = Point("000007", ((3, "d3"), (2, "d2")), SlotClock(6, 5, 10, 4), 11, 64, 48, 32, 5, 1)


def test_a_rollback_voids_what_came_after_and_ends_all_leases() -> None:
    run = _training()
    outcome = handle(run.state, RollBack(POINT, 2, "a spike"), run.now_s, LAYOUT)
    left = [e for e in outcome.effects if isinstance(e, Disconnect)]
    assert [effect.learner for effect in left] == ["a", "b"]
    assert all("snapshot 000007 in epoch 2 (a spike)" in str(effect.note) for effect in left)
    token = run.token("a")
    assert "64 tokens count" in _sentence(run.tell(RollBack(POINT, 2, "a spike")))
    state = run.state
    assert (state.epoch, state.tokens_trained, state.rounds_merged) == (2, 64, 5)
    assert [(f.version, f.digest, f.arrived) for f in state.fragments] == [
        (3, "d3", ()),
        (2, "d2", ()),
    ]
    assert state.phase is Phase.WAITING
    assert state.phase_reason.endswith(", gone back to snapshot 000007 (a spike)")
    assert isinstance(run.tell(RollBack(POINT, 2, "")), Denied), "another one was faster"
    answer = run.join("a", bases=(), cursor=2)
    assert isinstance(answer, Welcome)
    assert (answer.epoch, answer.versions, answer.consumed) == (2, (3, 2), (-1, -1))
    assert answer.cursor == 2, "no batch is trained twice"
    assert answer.lease.token > token
    run.step("a", 3)
    assert run.state.tokens_trained == 64, "the first report says where it counts from"
    run.step("a", 4)
    assert run.state.tokens_trained == 80
    assert run.state.phase_reason.endswith(", gone back to snapshot 000007 (a spike)")
    run.state = replace(run.state, rounds_merged=run.state.rounds_merged + 1)
    run.step("a", 5)
    assert run.state.phase_reason in ("1 live learner", "1 live learner of at least 2")


def test_a_merge_that_was_under_way_while_the_run_went_back_is_of_no_use() -> None:
    run = _training()
    run.contribute("b", 1, 0, 0)
    order = run.orders.pop()
    run.tell(RollBack(POINT, 2, ""))
    before, published = run.state, len(run.published)
    run.tell(Merged(order.fragment, 1, "d1", order, epoch=1))
    assert (run.state, len(run.published)) == (before, published)


def test_a_rollback_keeps_settings_evictions_and_a_drain() -> None:
    run = _training()
    run.tell(Change((("quorum", "2"),), ""))
    run.tell(Evict("b", ""))
    run.tell(Hold("look"))
    run.tell(RollBack(POINT, 2, ""))
    assert run.phase() is Phase.DRAINING
    assert run.state.spec.quorum == 2
    assert isinstance(run.join("b"), Refusal)
