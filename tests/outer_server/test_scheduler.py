"""The scheduler as a whole: a run by hand, and every order of events by property."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragments.records import (
    PROTOCOL_VERSION,
    Adopted,
    Ask,
    ContributionKey,
    Decline,
    DeclineReason,
    Evaluation,
    HeldBase,
    Hello,
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
    Discard,
    Drain,
    Effect,
    Evaluated,
    Event,
    HasAdopted,
    Join,
    Leave,
    Merged,
    Note,
    Publish,
    Reply,
    Reported,
    Send,
    StartMerge,
    Tick,
)
from outer_server.core.resume import resume
from outer_server.core.scheduler import handle
from outer_server.core.state import (
    ContributionMeta,
    MergeOrder,
    RoundStage,
    RunState,
    new_state,
)
from tests.support.tiny import tiny_spec

LAYOUT = "layout"


class Run:
    """A scheduler with its state, and what it asked for so far."""

    def __init__(self, **spec: object) -> None:
        self.state: RunState = new_state(tiny_spec(**spec), ["d0", "d0"], generation=1)
        self.now_s = 0.0
        self.asks: list[tuple[str | None, Ask]] = []
        self.orders: list[MergeOrder] = []
        self.published: list[Publish] = []
        self.refusals: list[Note] = []
        self.discarded: list[ContributionKey] = []

    def tell(self, event: Event) -> Reply:
        outcome = handle(self.state, event, self.now_s, LAYOUT)
        self.state = outcome.state
        for effect in outcome.effects:
            self._keep(effect)
        return outcome.reply

    def _keep(self, effect: Effect) -> None:
        match effect:
            case Send(learner, Ask() as ask):
                self.asks.append((learner, ask))
            case StartMerge(order):
                self.orders.append(order)
            case Publish():
                self.published.append(effect)
            case Note(what="contribution_refused"):
                self.refusals.append(effect)
            case Discard(keys):
                self.discarded += keys

    def join(self, name: str, incarnation: str = "1", **hello: object) -> Reply:
        base = Hello(PROTOCOL_VERSION, "tiny", LAYOUT, name, Role.LEARNER, incarnation)
        return self.tell(Join(replace(base, **hello)))  # type: ignore[arg-type]  # test keywords

    def phase(self) -> Phase:
        return self.state.phase

    def token(self, name: str) -> int:
        return self.state.learners[name].token

    def step(self, name: str, step: int) -> None:
        """Report every step up to `step`, as learners do."""
        first = self.state.learners[name].report.step + 1
        for now in range(first, step + 1):
            report = Report(step=now, tokens=16 * now, cursor=now)
            self.tell(Reported(name, self.token(name), report))

    def adopt(self, name: str, fragment: int) -> None:
        record = self.state.learners[name]
        version = Version(self.state.epoch, self.state.fragments[fragment].version)
        digest = self.state.fragments[fragment].digest
        adopted = Adopted(fragment, version, digest, record.report.step)
        self.tell(HasAdopted(name, record.token, adopted))

    def contribute(self, name: str, fragment: int, base: int, asked: int, text: str = "x") -> Reply:
        epoch = self.state.epoch
        key = ContributionKey(name, fragment, Version(epoch, base))
        meta = ContributionMeta(key, steps=2, tokens=32, cursor_from=0, cursor_to=2)
        event = Contributed(name, self.token(name), meta, Version(epoch, asked), text)
        return self.tell(event)

    def finish_merge(self) -> None:
        order = self.orders.pop(0)
        version = order.version + 1
        self.tell(Merged(order.fragment, version, f"d{version}", order))

    def trained(self, *names: str) -> None:
        for name in names:
            self.join(name)
            for fragment in range(2):
                self.adopt(name, fragment)


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


def test_below_min_learners_no_round_opens_and_the_status_says_so() -> None:
    run = Run(min_learners=2)
    run.trained("a")
    run.step("a", 8)
    assert run.asks == []
    assert run.state.phase is Phase.WAITING
    assert run.state.phase_reason == "1 live learners of at least 2"


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
    assert notes == [*versions, Progress(2, 48, Phase.TRAINING, 4), Ask(1, Version(1, 0))]


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


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: nothing counts twice, nothing accepted is lost."""

    @initialize(quorum=st.integers(1, 3), min_learners=st.integers(1, 2))
    def begin(self, quorum: int, min_learners: int) -> None:
        self.run = Run(quorum=quorum, min_learners=min_learners, budget_tokens=10**6)
        self.accepted: set[ContributionKey] = set()
        self.merged: Counter[ContributionKey] = Counter()
        self.last_step = 0
        for name in "abc":
            self.run.trained(name)

    names = st.sampled_from("abc")

    @rule(name=names, incarnation=st.sampled_from("12"))
    def join(self, name: str, incarnation: str) -> None:
        self.run.join(name, incarnation)

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.run.tell(Leave(name, self.run.token(name), "test"))

    @rule(name=names, steps=st.integers(1, 5))
    def step(self, name: str, steps: int) -> None:
        self.run.step(name, self.run.state.learners[name].report.step + steps)

    @rule(name=names, fragment=st.integers(0, 1))
    def adopt(self, name: str, fragment: int) -> None:
        self.run.adopt(name, fragment)

    @rule(
        name=names, fragment=st.integers(0, 1), behind=st.integers(0, 2), text=st.sampled_from("xy")
    )
    def contribute(self, name: str, fragment: int, behind: int, text: str) -> None:
        version = self.run.state.fragments[fragment].version
        base = max(0, version - behind)
        reply = self.run.contribute(name, fragment, base, version, text)
        if isinstance(reply, Receipt) and not reply.duplicate:
            assert reply.key not in self.accepted
            self.accepted.add(reply.key)

    @rule(name=names, fragment=st.integers(0, 1))
    def decline(self, name: str, fragment: int) -> None:
        version = Version(self.run.state.epoch, self.run.state.fragments[fragment].version)
        decline = Decline(fragment, version, DeclineReason.NO_STEPS)
        self.run.tell(Declined(name, self.run.token(name), decline))

    @rule(seconds=st.floats(0.0, 8.0))
    def time_passes(self, seconds: float) -> None:
        self.run.now_s += seconds
        self.run.tell(Tick())

    @precondition(lambda self: self.run.orders)
    @rule()
    def merge(self) -> None:
        self.merged.update(meta.key for meta in self.run.orders[0].contributions)
        self.run.finish_merge()

    @rule()
    def restart(self) -> None:
        self.run.orders.clear()
        self.run.state = resume(self.run.state, self.run.state.generation + 1, epoch=1)
        self.run.now_s = 0.0

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "run"):
            return
        assert max(self.merged.values(), default=1) == 1
        waiting = [m.key for f in self.run.state.fragments for m in f.arrived]
        merging = [m.key for order in self.run.orders for m in order.contributions]
        here = Counter([*waiting, *merging, *self.merged])
        assert set(here) == self.accepted
        assert max(here.values(), default=1) == 1

    @invariant()
    def the_clock_never_falls(self) -> None:
        if not hasattr(self, "run"):
            return
        assert self.run.state.global_step >= self.last_step
        self.last_step = self.run.state.global_step


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestAnyOrder = AnyOrder.TestCase
