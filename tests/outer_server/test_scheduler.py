"""The scheduler as a whole, by hand."""

from __future__ import annotations

from dataclasses import replace

from fragments.records import (
    Adopted,
    Ask,
    ContributionKey,
    Decline,
    DeclineReason,
    Evaluation,
    Goodbye,
    Phase,
    Progress,
    Published,
    Receipt,
    Refusal,
    RefusalCode,
    Report,
    Role,
    Version,
    Welcome,
)
from outer_server.core.events import (
    Attached,
    Contributed,
    Declined,
    Disconnect,
    Drain,
    Evaluated,
    HasAdopted,
    Merged,
    Note,
    Publish,
    Reply,
    Reported,
    Send,
    Started,
    Tick,
)
from outer_server.core.resume import resume
from outer_server.core.scheduler import handle
from outer_server.core.state import (
    ContributionMeta,
    FragmentState,
)
from tests.support.scheduled import LAYOUT, Run


def test_a_round_from_slot_to_publication() -> None:
    run = Run()
    run.trained("a", "b")
    assert run.state.phase is Phase.TRAINING
    run.step("a", 1)
    run.step("b", 1)
    assert run.asks == []
    run.step("a", 2)  # slot 1 falls at step 4*1//2 = 2 and is fragment 1's
    assert run.asks == [("a", Ask(1, Version(1, 0))), ("b", Ask(1, Version(1, 0)))]
    assert run.contribute("a", 1, base=0, asked=0) == Receipt(
        ContributionKey("a", 1, Version(1, 0))
    )
    assert run.orders == []
    run.contribute("b", 1, base=0, asked=0)
    (order,) = run.orders
    assert [p.share for p in order.participants] == [0.5, 0.5]
    run.finish_merge()
    assert run.published == [Publish(1, 1)]
    assert (run.state.fragments[1].version, run.state.fragments[1].digest) == (1, "d1")
    assert run.state.tokens_merged == 64


def test_a_learner_without_a_step_on_its_base_is_not_asked() -> None:
    run = Run()
    run.trained("a", "b")
    run.step("a", 2)
    assert [name for name, _ in run.asks] == ["a"]


def test_a_repeated_push_gets_the_first_receipt_and_another_payload_is_refused() -> None:
    run = Run()
    run.trained("a", "b")
    run.step("a", 2)
    run.contribute("a", 1, base=0, asked=0)
    again = run.contribute("a", 1, base=0, asked=0)
    assert isinstance(again, Receipt)
    assert again.duplicate
    other = run.contribute("a", 1, base=0, asked=0, text="y")
    assert isinstance(other, Refusal)
    assert other.code is RefusalCode.CONSUMED
    (order,) = run.orders
    assert len(order.contributions) == 1


def test_only_those_are_asked_who_have_reached_the_slot_where_the_run_says_so() -> None:
    """K = 1, so the first is the clock: t = 2 when a makes its second step, where slot 1 falls."""
    everybody, reached = Run(), Run(asked="reached")
    for run in (everybody, reached):
        run.trained("a", "b", "c")
        run.step("b", 1)
        run.step("a", 1)
        run.step("c", 1)
        run.step("a", 2)
    assert [name for name, _ in everybody.asks] == ["a", "b", "c"]
    assert [name for name, _ in reached.asks] == ["a"]
    # It closes on a's answer alone, and the others are asked at no later slot that they miss.
    reached.contribute("a", 1, base=0, asked=0)
    assert [p.learner for p in reached.orders[0].participants] == ["a"]
    reached.step("b", 3)
    reached.step("c", 4)  # slot 2 falls at 4, fragment 0's
    assert reached.asks[1:] == [("c", Ask(0, Version(1, 0)))]


def test_below_the_quorum_a_round_is_abandoned_and_its_contribution_waits() -> None:
    run = Run(quorum=2)
    run.trained("a", "b")
    for step in (1, 2):
        run.step("a", step)
        run.step("b", step)
    run.contribute("a", 1, base=0, asked=0)
    for step in (4, 6):
        run.step("a", step)
        run.step("b", step)
    assert run.state.rounds_abandoned == 1
    assert [ask for ask in run.asks if ask[1].fragment == 1][-1] == ("b", Ask(1, Version(1, 0)))
    run.contribute("b", 1, base=0, asked=0)
    assert [p.learner for p in run.orders[-1].participants] == ["a", "b"]


def test_below_min_learners_no_round_opens_and_the_status_says_so() -> None:
    run = Run(min_learners=2)
    run.trained("a")
    run.step("a", 8)
    assert run.asks == []
    assert run.state.phase is Phase.WAITING
    assert run.state.phase_reason == "1 live learner of at least 2"


def test_the_reason_of_a_phase_is_that_of_now() -> None:
    run = Run()
    run.trained("a")
    assert (run.state.phase, run.state.phase_reason) == (Phase.TRAINING, "1 live learner")
    run.trained("b")
    assert (run.state.phase, run.state.phase_reason) == (Phase.TRAINING, "2 live learners")


def test_at_the_budget_there_is_one_closing_lap_and_then_the_run_is_finished() -> None:
    run = Run(budget_tokens=16)
    run.trained("a")
    run.step("a", 1)
    assert run.state.phase is Phase.CLOSING
    assert [ask.fragment for _, ask in run.asks] == [0, 1]
    run.contribute("a", 0, base=0, asked=0)
    run.contribute("a", 1, base=0, asked=0)
    run.finish_merge()
    assert run.phase() is Phase.CLOSING
    run.finish_merge()
    assert run.phase() is Phase.FINISHED
    welcome = run.join("z")
    assert isinstance(welcome, Welcome)
    assert welcome.phase is Phase.FINISHED


def test_the_closing_lap_is_bounded_in_time() -> None:
    run = Run(budget_tokens=160, closing_lap_s=5.0, lease_ttl_s=100.0)
    run.trained("a")
    run.step("a", 10)
    run.now_s = 5.0
    run.tell(Tick())
    assert run.state.phase is Phase.FINISHED


def test_the_budget_is_not_closed_on_while_learners_are_missing() -> None:
    run = Run(budget_tokens=32, min_learners=2)
    run.trained("a")
    run.step("a", 4)
    assert run.phase() is Phase.WAITING
    run.trained("b")
    assert run.phase() is Phase.CLOSING


def test_a_merge_that_cannot_be_done_freezes_nobody() -> None:
    run = Run()
    run.trained("a")
    run.step("a", 2)
    run.contribute("a", 1, base=0, asked=0)
    order = run.orders.pop()
    run.tell(Merged(1, 1, "d0", order, refused="not finite"))
    assert run.published == [Publish(1, 1)]
    assert (run.state.rounds_merged, run.state.rounds_abandoned) == (0, 1)
    run.adopt("a", 1)
    run.step("a", 6)
    assert ("a", Ask(1, Version(1, 1))) in run.asks


def test_a_new_stream_hears_of_every_version_and_of_open_asks() -> None:
    run = Run()
    run.trained("a", "b")
    run.step("b", 1)
    run.step("a", 2)
    outcome = handle(run.state, Attached("a", run.token("a")), run.now_s, LAYOUT)
    notes = [effect.note for effect in outcome.effects if isinstance(effect, Send)]
    versions = [Published(0, Version(1, 0)), Published(1, Version(1, 0))]
    assert notes == [*versions, Progress(2, 48, Phase.TRAINING, 4, 6400), Ask(1, Version(1, 0))]


def _held_at(run: Run, name: str, step: int) -> None:
    report = Report(step=step, tokens=16 * step, cursor=step, paused=True)
    run.tell(Reported(name, run.token(name), report))


def test_learners_that_all_pause_short_of_the_next_slot_are_asked_nevertheless() -> None:
    """Their first reports came late, so that their steps count less than they are."""
    run = Run(quorum=2, min_learners=2)
    run.trained("a", "b")
    _held_at(run, "a", 4)
    assert run.asks == []  # the other may still come to the slot by itself
    _held_at(run, "b", 4)
    assert run.asks == [("a", Ask(1, Version(1, 0))), ("b", Ask(1, Version(1, 0)))]
    assert run.state.global_step == 2
    # While that is on its way nobody is taken any further, however often they say it.
    _held_at(run, "a", 4)
    _held_at(run, "b", 4)
    run.contribute("a", 1, base=0, asked=0)
    run.contribute("b", 1, base=0, asked=0)
    run.finish_merge()
    for name in ("a", "b"):
        _held_at(run, name, 4)
    assert run.state.global_step == 2
    # Nor once they have what came out of it, and may step again.
    run.adopt("a", 1)
    run.adopt("b", 1)
    assert run.state.global_step == 2
    # They say so where the other fragment still holds them.
    _held_at(run, "a", 4)
    _held_at(run, "b", 4)
    assert run.state.global_step == 4
    assert [ask.fragment for _, ask in run.asks] == [1, 1, 0, 0]


def test_absurd_numbers_change_nothing() -> None:
    run = Run()
    run.trained("a")
    before = run.state
    token = run.token("a")
    for step, tokens in ((1 << 60, 16), (1, 1 << 63), (-1, 16), (1, -16)):
        run.tell(Reported("a", token, Report(step, tokens, 1)))
    assert run.state == before
    key = ContributionKey("a", 0, Version(1, 0))
    for meta in (
        ContributionMeta(key, 1 << 60, 16, 0, 1),
        ContributionMeta(key, 1, 1 << 63, 0, 1),
        ContributionMeta(key, 1, 16, 5, 1),
        ContributionMeta(key, 0, 16, 0, 1),
    ):
        refusal = run.tell(Contributed("a", token, meta, Version(1, 0), "x"))
        assert isinstance(refusal, Refusal)
        assert refusal.code is RefusalCode.MISMATCH


def test_an_evaluator_contributes_nothing_and_a_learner_judges_nothing() -> None:
    run = Run()
    run.trained("a")
    run.join("judge", role=Role.EVALUATOR)
    key = ContributionKey("judge", 0, Version(1, 0))
    meta = ContributionMeta(key, 1, 16, 0, 1)
    token = run.token("judge")
    refusal = run.tell(Contributed("judge", token, meta, Version(1, 0), "x"))
    assert isinstance(refusal, Refusal)
    loss = Evaluation(1.0, "nats", 0, 0, (0, 0))
    run.tell(Evaluated("a", run.token("a"), loss))
    assert not run.state.evaluations
    run.tell(Evaluated("judge", token, loss))
    assert [entry.evaluation for entry in run.state.evaluations] == [loss]


def test_draining_parks_open_rounds_and_a_restart_goes_on_with_what_arrived() -> None:
    run = Run()
    run.trained("a", "b")
    run.step("b", 1)
    run.step("a", 2)
    run.tell(Drain("stop"))
    run.contribute("a", 1, base=0, asked=0)
    run.contribute("b", 1, base=0, asked=0)
    assert run.orders == []
    state = resume(run.state, generation=2, epoch=1)
    assert [m.key.learner for m in state.fragments[1].arrived] == ["a", "b"]
    assert state.epoch == 1
    assert all(record.live for record in state.learners.values())
    rolled_back = resume(run.state, generation=2, epoch=2)
    assert rolled_back.epoch == 2
    assert rolled_back.fragments[1].arrived == ()
    assert not any(record.live for record in rolled_back.learners.values())


def test_a_server_that_was_away_waits_for_whom_it_knows_before_a_round_opens() -> None:
    run = Run()
    run.trained("a", "b")
    run.step("a", 1)
    run.step("b", 1)
    run.tell(Started(generation=2, epoch=1, hold_s=7.0))
    run.now_s = 1.0
    run.step("a", 6)
    assert run.state.phase is Phase.TRAINING
    assert run.asks == []
    run.now_s = 2.0
    run.step("b", 2)
    assert {ask.fragment for _, ask in run.asks} == {0, 1}
    assert {name for name, _ in run.asks} == {"a", "b"}


def test_whoever_does_not_come_back_in_time_is_not_waited_for() -> None:
    run = Run()
    run.trained("a", "b")
    run.step("a", 1)
    run.tell(Started(generation=2, epoch=1, hold_s=7.0))
    run.now_s = 1.0
    run.step("a", 6)
    outcome = handle(run.state, Tick(), run.now_s, LAYOUT)
    assert outcome.wake_at_s <= 7.0
    run.now_s = 7.0
    run.tell(Tick())
    assert {name for name, _ in run.asks} == {"a"}


def test_who_has_contributed_what_is_not_known_here_joins_again_and_answers_anew() -> None:
    run = Run()
    run.trained("a", "b")
    run.step("a", 2)
    (_, ask), *_ = run.asks
    declined = Decline(ask.fragment, ask.version, DeclineReason.CONSUMED, Version(1, 0))
    event = Declined("a", run.token("a"), declined)
    outcome = handle(run.state, event, run.now_s, LAYOUT)
    (note,) = (e for e in outcome.effects if isinstance(e, Note) and e.what == "contribution_lost")
    assert ("fragment", ask.fragment) in note.fields
    (sent_off,) = (e for e in outcome.effects if isinstance(e, Disconnect))
    assert isinstance(sent_off.note, Goodbye)
    assert (sent_off.learner, sent_off.note.code) == ("a", RefusalCode.LEASE_LOST)
    # Of another base than it holds by now, which it had not adopted when it declined, or of none.
    for base in (Version(1, 7), Version(2, 0), None):
        other = Declined("a", run.token("a"), replace(declined, consumed_base=base))
        effects = handle(run.state, other, run.now_s, LAYOUT).effects
        assert not any(isinstance(effect, Disconnect) for effect in effects)
    # Where it is known, nothing of the kind.
    run.contribute("a", ask.fragment, base=0, asked=0)
    again = handle(run.state, event, run.now_s, LAYOUT)
    assert not any(isinstance(effect, Disconnect) for effect in again.effects)


def test_who_comes_from_a_later_epoch_proves_that_an_older_copy_is_served() -> None:
    run = Run()
    run.trained("a", "b")
    later = Adopted(0, Version(4, 0), "d9", 1)
    outcome = handle(run.state, HasAdopted("a", run.token("a"), later), run.now_s, LAYOUT)
    assert outcome.state.epoch == 5
    assert {e.learner for e in outcome.effects if isinstance(e, Disconnect)} == {"a", "b"}
    # From an earlier one it has missed something, and hears of it.
    assert run.state.epoch == 1
    earlier = Adopted(0, Version(0, 9), "d9", 1)
    outcome = handle(run.state, HasAdopted("a", run.token("a"), earlier), run.now_s, LAYOUT)
    assert outcome.state.epoch == 1


def test_what_is_trained_on_other_values_of_a_version_is_not_taken() -> None:
    """Two values of one name: the journal had lost its end, and the version was made anew."""
    run = Run()
    run.trained("a", "b")
    run.step("a", 1)
    run.step("b", 2)
    for name in "ab":
        run.contribute(name, 1, base=0, asked=0)
    run.finish_merge()
    run.adopt("b", 1)
    assert run.state.fragments[1].digest_of(0) == "d0"
    assert run.state.fragments[1].digest_of(1) == "d1"
    assert run.state.fragments[1].digest_of(2) is None

    def pushed(name: str, fragment: int, base: int, digest: str) -> Reply:
        key = ContributionKey(name, fragment, Version(1, base))
        meta = ContributionMeta(key, steps=2, tokens=32, cursor_from=0, cursor_to=2)
        event = Contributed(name, run.token(name), meta, Version(1, base), "y", digest)
        return run.tell(event)

    for base, other in ((1, "d0"), (1, "x")):
        refusal = pushed("b", 1, base, other)
        assert isinstance(refusal, Refusal)
        assert refusal.code is RefusalCode.BAD_PAYLOAD
    assert isinstance(pushed("b", 1, 1, "d1"), Receipt)
    # Who does not say it is taken at its word, as before.
    assert isinstance(pushed("a", 0, 0, ""), Receipt)
    # And who says that it holds the like is sent for the whole values.
    for version, digest, is_other in ((0, "d0", False), (0, "x", True), (1, "x", True)):
        told = HasAdopted("a", run.token("a"), Adopted(1, Version(1, version), digest, 2))
        outcome = handle(run.state, told, run.now_s, LAYOUT)
        assert any(isinstance(e, Disconnect) for e in outcome.effects) is is_other


def test_digests_are_remembered_as_far_back_as_contributions_may_reach() -> None:
    fragment = FragmentState(digest="d0")
    for version in range(1, 10):
        fragment = fragment.followed_by(version, f"d{version}", 3)
    assert fragment.past == ("d6", "d7", "d8")
    assert [fragment.digest_of(n) for n in (5, 6, 9)] == [None, "d6", "d9"]
    assert fragment.followed_by(10, "d10", 0).past == ()
