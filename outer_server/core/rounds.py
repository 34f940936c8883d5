"""The rules that open, close and finish rounds."""

from __future__ import annotations

import math
from dataclasses import replace

from fragments.records import Ask, Phase, Published, Version
from fragments.runspec import LARGEST_BUDGET
from outer_server.core import close, receive
from outer_server.core.events import (
    Discard,
    Effect,
    Merged,
    Note,
    Publish,
    Send,
    StartMerge,
)
from outer_server.core.state import (
    ContributionMeta,
    LearnerRecord,
    Round,
    RoundStage,
    RunState,
)
from outer_server.core.weights import merge_order


def eligible(state: RunState, fragment: int) -> tuple[LearnerRecord, ...]:
    """Live learners with a step on a base that no contribution has consumed.

    With `asked="reached"` only those whose own position has reached the global
    step: it is known to lose (see docs/study.md) and kept to show that.
    """
    current = state.fragments[fragment].version
    return tuple(
        record
        for record in state.live_learners
        if (base := record.bases[fragment]).version > base.consumed
        and record.report.step > base.at_step
        and current - base.version <= state.spec.staleness_bound
        and (state.spec.asked == "all" or record.position >= state.global_step)
    )


def slot_came(state: RunState, fragment: int, now_s: float) -> tuple[RunState, list[Effect]]:
    """A fragment is due again: settle its old round, and queue a new one."""
    effects: list[Effect] = []
    round_ = state.fragments[fragment].round
    if round_ is not None and round_.stage is RoundStage.MERGING:
        return state, []
    if round_ is not None:
        decision = close.decide(state, round_, now_s, bound_reached=True)
        if decision.verdict is close.Verdict.CLOSE:
            return close_round(state, round_, decision.reason, now_s)
        state, effects = abandon(state, round_, "its fragment's next slot came")
    if fragment not in state.due:
        state = replace(state, due=(*state.due, fragment))
    return state, effects


def open_due(state: RunState, now_s: float) -> tuple[RunState, list[Effect]]:
    """Open rounds for the due fragments, oldest first, up to `max_open_rounds`."""
    effects: list[Effect] = []
    waiting: list[int] = []
    for fragment in state.due:
        if (
            state.fragments[fragment].round is not None
            or len(state.open_rounds) >= state.spec.max_open_rounds
        ):
            waiting.append(fragment)
        else:
            state, opened = _open(state, fragment, now_s)
            effects += opened
    return replace(state, due=tuple(waiting)), effects


def _open(state: RunState, fragment: int, now_s: float) -> tuple[RunState, list[Effect]]:
    asked = eligible(state, fragment)
    waiting = close.contributors(state, fragment)
    if not asked and len(waiting) < state.quorum_effective:
        return state, []
    version = state.fragments[fragment].version
    round_ = Round(
        fragment=fragment,
        version=version,
        opened_at_s=now_s,
        opened_at_step=state.global_step,
        asked=tuple(record.name for record in asked),
    )
    state = state.with_fragment(fragment, replace(state.fragments[fragment], round=round_))
    effects: list[Effect] = []
    for record in asked:
        base = replace(record.bases[fragment], asked_version=version, asked_at_s=now_s)
        state = state.with_learner(record.with_base(fragment, base))
        effects.append(Send(record.name, Ask(fragment, Version(state.epoch, version))))
    return state, effects


def close_ready(state: RunState, now_s: float) -> tuple[RunState, list[Effect], float]:
    """Close or abandon what is ready; also when to look again if nothing happens."""
    effects: list[Effect] = []
    look_again_s = math.inf
    for round_ in state.open_rounds:
        if round_.stage is RoundStage.MERGING:
            continue
        bound_reached = _longest_wait_over(state, round_, now_s)
        decision = close.decide(state, round_, now_s, bound_reached=bound_reached)
        more: list[Effect] = []
        if decision.verdict is close.Verdict.CLOSE:
            state, more = close_round(state, round_, decision.reason, now_s)
        elif decision.verdict is close.Verdict.ABANDON:
            state, more = abandon(state, round_, decision.reason)
        elif state.phase is Phase.CLOSING and now_s >= state.closing_until_s:
            state, more = abandon(state, round_, "the closing lap is over")
        else:
            look_again_s = min(look_again_s, decision.look_again_s)
        effects += more
    return state, effects, look_again_s


def _longest_wait_over(state: RunState, round_: Round, now_s: float) -> bool:
    if state.phase is Phase.CLOSING:
        return now_s >= state.closing_until_s
    return state.global_step - round_.opened_at_step >= close.longest_wait_steps(state)


def close_round(
    state: RunState, round_: Round, reason: str, now_s: float
) -> tuple[RunState, list[Effect]]:
    """Stop collecting and have what arrived merged; one answer is on the current version."""
    fragment = state.fragments[round_.fragment]
    absent = close.missing(state, round_)
    state = replace(state, learners=close.note_misses(state.learners, absent))
    state, fresh, effects = _refuse_stale(state, fragment.arrived)
    order = merge_order(round_.fragment, round_.version, fresh, state.spec.weight_bound)
    is_mean = state.phase is Phase.CLOSING and state.spec.closing_lap == "mean"
    order = replace(order, closing=is_mean, merge=state.spec.merge, outer=state.spec.outer)
    merging = replace(round_, stage=RoundStage.MERGING, order=order)
    state = state.with_fragment(
        round_.fragment, replace(fragment, round=merging, arrived=(), closed_at_s=now_s)
    )
    names = ",".join(p.learner for p in order.participants)
    fields = (
        ("fragment", round_.fragment),
        ("version", round_.version),
        ("participants", names),
        ("missing", ",".join(record.name for record in absent)),
    )
    return state, [*effects, Note("round_closed", reason, fields), StartMerge(order)]


def _refuse_stale(
    state: RunState, arrived: tuple[ContributionMeta, ...]
) -> tuple[RunState, tuple[ContributionMeta, ...], list[Effect]]:
    """What of `arrived` is within the bound still; the rest is counted, told and discarded."""
    effects: list[Effect] = []
    fresh: list[ContributionMeta] = []
    for meta in arrived:
        stale = receive.staleness(state, meta)
        if stale is None:
            fresh.append(meta)
            continue
        state, note = receive.refused(state, meta.key.learner, meta.key.fragment, stale)
        effects += [note, Discard((meta.key,))]
    return state, tuple(fresh), effects


def abandon(state: RunState, round_: Round, reason: str) -> tuple[RunState, list[Effect]]:
    """End a round without a new version; what arrived waits for the next."""
    fragment = state.fragments[round_.fragment]
    absent = close.missing(state, round_)
    state = replace(state, learners=close.note_misses(state.learners, absent))
    state = state.with_fragment(round_.fragment, replace(fragment, round=None))
    state = replace(state, rounds_abandoned=state.rounds_abandoned + 1)
    return state, list(_abandoned_note(round_, reason))


def _abandoned_note(round_: Round, reason: str) -> tuple[Note, ...]:
    fields = (("fragment", round_.fragment), ("version", round_.version))
    return (Note("round_abandoned", reason, fields),)


def merged(state: RunState, event: Merged) -> tuple[RunState, list[Effect]]:
    """A merge is done: the fragment has a new version, which may be pulled.

    Where the contributions could not be merged, the version is new all the same:
    their senders' bases are consumed, and only a newer one lets them answer again. One that was
    under way while the run went back to a snapshot is of no use.
    """
    if event.epoch not in (None, state.epoch):
        return state, []
    fragment, metas = state.fragments[event.fragment], event.order.contributions
    fragment = fragment.followed_by(event.version, event.digest, state.spec.staleness_bound)
    state = state.with_fragment(event.fragment, fragment)
    effects: list[Effect] = [
        Publish(event.fragment, event.version),
        Discard(tuple(meta.key for meta in metas)),
        Send(None, Published(event.fragment, Version(state.epoch, event.version))),
    ]
    if event.refused is not None:
        fields = (("fragment", event.fragment), ("version", event.order.version))
        state = replace(state, rounds_abandoned=state.rounds_abandoned + 1)
        return state, [*effects, Note("merge_refused", event.refused, fields)]
    for participant in event.order.participants:
        state = _credit(state, participant.learner, participant.contributions)
    tokens = sum(meta.tokens for meta in metas)
    return replace(
        state,
        rounds_merged=state.rounds_merged + 1,
        tokens_merged=min(LARGEST_BUDGET, state.tokens_merged + tokens),
    ), effects


def _credit(state: RunState, learner: str, metas: tuple[ContributionMeta, ...]) -> RunState:
    record = state.learners.get(learner)
    if record is None:
        return state
    tokens = sum(m.tokens for m in metas)
    tally = replace(
        record.tally,
        contributions_merged=record.tally.contributions_merged + len(metas),
        tokens_merged=record.tally.tokens_merged + tokens,
    )
    return state.with_learner(replace(record, tally=tally))
