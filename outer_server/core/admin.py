"""What an operator may do to a run. Every rule is answered with a sentence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeAlias

from fragments.changes import changed, value_of
from fragments.errors import SettingsError
from fragments.records import Answered, Goodbye, Phase, RefusalCode
from outer_server.core import membership
from outer_server.core.events import (
    Change,
    Denied,
    Discard,
    Disconnect,
    Effect,
    Evict,
    Hold,
    Note,
    Point,
    Release,
    RollBack,
    Send,
)
from outer_server.core.resume import void
from outer_server.core.state import (
    ContributionMeta,
    Eviction,
    FragmentState,
    LearnerRecord,
    Rollback,
    RunState,
)

ROLLBACKS_KEPT = 8
"""Newest ones known. Each writes a snapshot, and three are kept: who needs an older one is gone."""

Request: TypeAlias = Hold | Evict | Release | Change | RollBack
"""What an operator asks for."""

Ruling: TypeAlias = tuple[RunState, Answered | Denied, list[Effect]]


def rule(state: RunState, event: Request, now_s: float) -> Ruling:
    """What becomes of a request. Denied has changed nothing."""
    match event:
        case Hold():
            return _hold(state, event)
        case Evict():
            return _evict(state, event, now_s)
        case Release(name=None):
            return _release_all(state, event)
        case Release():
            return _release_one(state, event)
        case Change():
            return _change(state, event)
        case RollBack():
            return _roll_back(state, event)


def expire(state: RunState, now_s: float) -> tuple[RunState, list[Effect], float]:
    """Release those that were evicted for a time; also when the next is to be."""
    ends = {
        name: eviction.since_s + eviction.for_s
        for name, eviction in state.evicted.items()
        if eviction.for_s is not None
    }
    over = {name for name, end_s in ends.items() if now_s >= end_s}
    next_s = min((end_s for name, end_s in ends.items() if name not in over), default=math.inf)
    if over:
        left = {name: each for name, each in state.evicted.items() if name not in over}
        state = replace(state, evicted=left)
    notes: list[Effect] = [
        Note("released", "the time of its eviction is over", (("learner", name),))
        for name in sorted(over)
    ]
    return state, notes, next_s


def remark(state: RunState) -> str:
    """What an operator has done that says why the run is where it is; begins with a comma."""
    parts = []
    if state.evicted:
        parts.append(f", evicted: {', '.join(sorted(state.evicted))}")
    last = state.rollbacks[-1] if state.rollbacks else None
    if last is not None and (last.epoch, last.rounds_merged) == (state.epoch, state.rounds_merged):
        parts.append(f", gone back to snapshot {last.snapshot}{membership.because(last.reason)}")
    return "".join(parts)


def _hold(state: RunState, event: Hold) -> Ruling:
    if state.phase is Phase.FINISHED:
        return state, Denied("the run is finished: there is nothing to drain"), []
    if state.phase is Phase.CLOSING:
        reason = f"the closing lap is on, and over within {state.spec.closing_lap_s:g} s"
        return state, Denied(f"the run cannot be drained any more: {reason}"), []
    because = membership.because(event.reason)
    held = f"drained by an operator{because}: no round opens until it is released"
    is_new, opened = not state.held, len(state.open_rounds)
    state = replace(state, held=held, due=())
    if not state.stopping:
        state = replace(state, phase=Phase.DRAINING, phase_reason=held)
    ends = {0: "none is open now", 1: "the one that is open ends by its rules"}
    still = ends.get(opened, f"the {opened} that are open end by their rules")
    sentence = f"drained: no round opens until `diloco admin release`; {still}; learners train on"
    return state, Answered(sentence, is_new), _told(state, "drained", held)


def _release_all(state: RunState, event: Release) -> Ruling:
    if not state.held:
        return state, Answered("the run was not drained", changed=False), []
    state = replace(state, held="")
    reason = f"released by an operator{membership.because(event.reason)}"
    if not state.stopping:
        state = replace(state, phase=Phase.WAITING, phase_reason=reason)
    return state, Answered("released: rounds open again"), _told(state, "released", reason)


def _evict(state: RunState, event: Evict, now_s: float) -> Ruling:
    name, record = event.name, state.learners.get(event.name)
    if record is None and name not in state.evicted:
        names = ", ".join(sorted(state.learners)) or "nobody has joined yet"
        return (
            state,
            Denied(f"there is no {name[: membership.MAX_TEXT]!r} in this run: {names}"),
            [],
        )
    if event.for_s is not None and not 0.0 < event.for_s < math.inf:
        return state, Denied(f"{event.for_s:g} s is no time to be evicted for"), []
    before = state.evicted.get(name)
    eviction = Eviction(event.reason[: membership.MAX_TEXT], now_s, event.for_s)
    is_new = before is None or (before.reason, before.for_s) != (eviction.reason, event.for_s)
    state = replace(state, evicted={**state.evicted, name: eviction})
    refusal = membership.evicted(state, name)
    effects: list[Effect] = [Note("evicted", refusal, (("learner", name),))]
    if record is not None and record.live:
        state = state.with_learner(membership.ended(record))
        effects.append(Disconnect(name, Goodbye(RefusalCode.EVICTED, refusal)))
    waiting = _waiting(state, name)
    what = f"{len(waiting)} contributions that wait are merged with the next rounds"
    if event.drop:
        state = _without(state, name, waiting)
        effects.append(Discard(tuple(meta.key for meta in waiting)))
        what = f"{len(waiting)} contributions that waited are dropped"
    until = "" if event.for_s is None else f", or {event.for_s:g} s are over"
    sentence = f"{name} is evicted until `diloco admin release {name}`{until}; {what}"
    return state, Answered(sentence, is_new or (event.drop and bool(waiting))), effects


def _release_one(state: RunState, event: Release) -> Ruling:
    name = event.name or ""
    if name not in state.evicted:
        return state, Answered(f"{name[: membership.MAX_TEXT]} was not evicted", changed=False), []
    left = {other: each for other, each in state.evicted.items() if other != name}
    state = replace(state, evicted=left)
    note = Note(
        "released", f"by an operator{membership.because(event.reason)}", (("learner", name),)
    )
    return state, Answered(f"{name} may join again"), [note]


def _waiting(state: RunState, name: str) -> tuple[ContributionMeta, ...]:
    """What a name has sent and no closing has taken."""
    return tuple(m for f in state.fragments for m in f.arrived if m.key.learner == name)


def _without(state: RunState, name: str, dropped: tuple[ContributionMeta, ...]) -> RunState:
    """The state in which `dropped`, which no round has taken, never came: their bases are as good
    as before. Whatever a round has taken of this name is older, so nothing can be merged twice.
    """
    for index, fragment in enumerate(state.fragments):
        of_here = [meta for meta in dropped if meta.key.fragment == index]
        if not of_here:
            continue
        round_ = fragment.round
        if round_ is not None:
            round_ = replace(round_, answered=round_.answered - {name})
        arrived = tuple(meta for meta in fragment.arrived if meta not in of_here)
        state = state.with_fragment(index, replace(fragment, round=round_, arrived=arrived))
        record = state.learners.get(name)
        if record is None:
            continue
        oldest = min(meta.key.base_version.number for meta in of_here)
        base = replace(record.bases[index], consumed=oldest - 1, consumed_payload="", dropped=False)
        state = state.with_learner(record.with_base(index, base))
    return state


def _change(state: RunState, event: Change) -> Ruling:
    try:
        spec = changed(state.spec, event.changes)
    except SettingsError as error:
        return state, Denied(str(error)), []
    if state.phase is Phase.FINISHED:
        reason = "the run is finished: only a rollback to an earlier snapshot takes it up again"
        return state, Denied(reason), []
    is_closing = state.phase is Phase.CLOSING
    if is_closing and spec.budget_tokens != state.spec.budget_tokens:
        reason = "budget_tokens cannot be changed any more: the closing lap is on"
        return state, Denied(reason), []
    news = [
        (key, value_of(state.spec, key), value_of(spec, key))
        for key in dict(event.changes)
        if value_of(state.spec, key) != value_of(spec, key)
    ]
    if not news:
        return state, Answered("these are the settings already", changed=False), []
    state = replace(state, spec=spec)
    sentence = "; ".join(f"{key}: {new} instead of {old}" for key, old, new in news)
    is_new_budget = any(key == "budget_tokens" for key, _old, _new in news)
    if is_new_budget and spec.budget_tokens <= state.tokens_trained and not is_closing:
        ends = "now" if state.phase is Phase.TRAINING else "as soon as it is trained again"
        sentence += f"; that is trained already, so that the run ends {ends}"
    note = Note("changed", f"by an operator{membership.because(event.reason)}: {sentence}")
    return state, Answered(sentence), [note, Send(None, membership.progress(state))]


def _roll_back(state: RunState, event: RollBack) -> Ruling:
    if state.stopping:
        return state, Denied("the server is about to stop: try again when it is back"), []
    if event.epoch <= state.epoch:
        return state, Denied("another epoch has begun meanwhile: look, and try again"), []
    point, lost = event.point, max(0, state.rounds_merged - event.point.rounds_merged)
    where = f"snapshot {point.snapshot} in epoch {event.epoch}{membership.because(event.reason)}"
    goodbye = Goodbye(RefusalCode.LEASE_LOST, f"the run went back to {where}: join again")
    effects: list[Effect] = [
        Disconnect(name, goodbye) for name, record in sorted(state.learners.items()) if record.live
    ]
    rollback = Rollback(
        event.epoch, point.snapshot, point.rounds_merged, event.reason[: membership.MAX_TEXT]
    )
    state = replace(_at(state, point), rollbacks=(*state.rollbacks, rollback)[-ROLLBACKS_KEPT:])
    state = replace(state, epoch=event.epoch, closing_until_s=0.0, stepped_at_s=None)
    learners = {
        name: _back(record, len(point.fragments)) for name, record in state.learners.items()
    }
    phase = Phase.DRAINING if state.held else Phase.WAITING
    reason = state.held or f"gone back to {where}"
    state = replace(state, learners=learners, phase=phase, phase_reason=reason)
    sentence = (
        f"gone back to snapshot {point.snapshot} in epoch {event.epoch}: {lost} rounds are void, "
        f"and {point.tokens_trained} tokens count as trained"
    )
    note = Note("rolled_back", f"to {where}", (("rounds_void", lost),))
    return state, Answered(sentence, snapshot=point.snapshot), [note, *effects]


def _at(state: RunState, point: Point) -> RunState:
    """The run's counters and versions as they were at `point`, with no round open."""
    return replace(
        state,
        fragments=tuple(FragmentState(version, digest) for version, digest in point.fragments),
        slots=point.slots,
        due=(),
        global_step=point.global_step,
        tokens_trained=point.tokens_trained,
        tokens_pushed=point.tokens_pushed,
        tokens_merged=point.tokens_merged,
        rounds_merged=point.rounds_merged,
        rounds_abandoned=point.rounds_abandoned,
    )


def _back(record: LearnerRecord, num_fragments: int) -> LearnerRecord:
    """Who had a lease has none, and left nobody; the data goes on where it was."""
    return void(membership.ended(record), num_fragments)


def _told(state: RunState, what: str, reason: str) -> list[Effect]:
    fields = (("phase", str(state.phase)),)
    return [Note(what, reason, fields), Send(None, membership.progress(state))]
