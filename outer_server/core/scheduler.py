"""The scheduler: (state, event, time) -> (state, effects, reply, when to wake).

An event records a fact; then all rules are applied in one fixed order until
nothing changes. No thread, no clock, no I/O: the server, the simulation and the
tests all run this function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fragments.records import Ask, Phase, Published, Version
from outer_server.core import admin, clock, membership, receive, rounds
from outer_server.core.events import (
    Attached,
    Change,
    Contributed,
    Declined,
    Discard,
    Drain,
    Effect,
    Evaluated,
    Event,
    Evict,
    HasAdopted,
    Hold,
    Join,
    Leave,
    Merged,
    Note,
    Release,
    Reply,
    Reported,
    RollBack,
    Send,
    Started,
    Tick,
)
from outer_server.core.resume import resume
from outer_server.core.state import RoundStage, RunState


@dataclass(frozen=True, slots=True)
class Outcome:
    """What follows from an event. `wake_at_s`: send a Tick then, if nothing happens before."""

    state: RunState
    effects: tuple[Effect, ...]
    reply: Reply
    wake_at_s: float


def handle(state: RunState, event: Event, now_s: float, layout_digest: str) -> Outcome:
    """Apply one event at `now_s` (seconds, monotonic) and every rule that it sets off."""
    if isinstance(event, Started):
        state = resume(state, event.generation, event.epoch, event.digests, keeps=event.keeps)
        hold_s = event.hold_s if state.live_learners else 0.0
        state = replace(state, held_back_until_s=hold_s)
        return Outcome(state, (), None, now_s)
    state, reply, effects = _record(state, event, now_s, layout_digest)
    state, more, wake_at_s = settle(state, now_s)
    return Outcome(state, (*effects, *more), reply, wake_at_s)


def _record(
    state: RunState, event: Event, now_s: float, layout_digest: str
) -> tuple[RunState, Reply, list[Effect]]:
    match event:
        case Join():
            return membership.join(state, event, now_s, layout_digest)
        case Leave():
            state, effects = membership.leave(state, event)
            return state, None, effects
        case Merged():
            state, effects = rounds.merged(state, event)
            return state, None, effects
        case Drain():
            if state.stopping or state.phase is Phase.FINISHED:
                return state, None, []
            return _enter(replace(state, stopping=True), Phase.DRAINING, event.reason)
        case Hold() | Evict() | Release() | Change() | RollBack():
            return admin.rule(state, event, now_s)
        case Tick() | Started():
            return state, None, []
        case Contributed():
            known = receive.heard(state, event.learner, event.token, now_s)
            return receive.contribute(known or state, event, now_s)
        case _:
            known = receive.heard(state, event.learner, event.token, now_s)
            return (state, None, []) if known is None else _record_spoken(known, event, now_s)


def _record_spoken(
    state: RunState,
    event: Reported | Declined | HasAdopted | Evaluated | Attached,
    now_s: float,
) -> tuple[RunState, Reply, list[Effect]]:
    effects: list[Effect] = []
    match event:
        case Reported():
            state = receive.report(state, event, now_s)
        case Declined():
            state, effects = receive.decline(state, event)
        case HasAdopted():
            state, effects = receive.adopted(state, event, now_s)
        case Evaluated():
            state, effects = receive.evaluated(state, event, now_s)
        case Attached():
            effects = _catch_up(state, event.learner)
    return state, None, effects


def _catch_up(state: RunState, learner: str) -> list[Effect]:
    """What an earlier stream may have swallowed: clock, versions, and asks still open."""
    effects: list[Effect] = [
        Send(learner, Published(index, membership.version_of(state, index)))
        for index in range(len(state.fragments))
    ]
    # After the versions: whoever hears that the run is finished has then heard of the last ones.
    effects.append(Send(learner, membership.progress(state)))
    for round_ in state.open_rounds:
        is_open = round_.stage is RoundStage.COLLECTING and learner in round_.asked
        if is_open and learner not in round_.answered | round_.declined:
            ask = Ask(round_.fragment, Version(state.epoch, round_.version))
            effects.append(Send(learner, ask))
    return effects


def settle(state: RunState, now_s: float) -> tuple[RunState, list[Effect], float]:
    """Apply the rules in order: leases, phase, clock, slots, closing, opening, the end."""
    state, effects, wake_at_s = _expire(state, now_s)
    state, more = _phase(state, now_s)
    effects += more
    state = clock.advance(state, now_s)
    state, due = clock.pass_slots(state)
    if state.phase is Phase.TRAINING:
        for fragment in due:
            state, more = rounds.slot_came(state, fragment, now_s)
            effects += more
    look_again_s = math.inf
    # Before a stop, rounds are parked as they stand: the snapshot keeps what arrived.
    settled = state.stopping
    while not settled:
        before = state
        state, more, look_again_s = rounds.close_ready(state, now_s)
        effects += more
        if state.phase in (Phase.TRAINING, Phase.CLOSING) and not _awaits_return(state, now_s):
            state, more = rounds.open_due(state, now_s)
            effects += more
        settled = state == before
    if _awaits_return(state, now_s):
        look_again_s = min(look_again_s, state.held_back_until_s)
    state, more = _finish(state, now_s)
    effects += more
    if state.phase is Phase.CLOSING:
        look_again_s = min(look_again_s, max(state.closing_until_s, now_s + 0.1))
    return state, effects, min(wake_at_s, look_again_s)


def _awaits_return(state: RunState, now_s: float) -> bool:
    """Whether somebody with a lease is still on the way back to a server that was away. The first
    to be back would else take the versions beyond the reach of what the others have trained.
    """
    return now_s < state.held_back_until_s and any(
        record.heard_at_s <= 0.0 for record in state.live_learners
    )


def _expire(state: RunState, now_s: float) -> tuple[RunState, list[Effect], float]:
    state, effects, next_expiry_s = admin.expire(state, now_s)
    for record in state.learners.values():
        if not record.live:
            continue
        expiry_s = record.heard_at_s + state.spec.lease_ttl_s
        if now_s >= expiry_s:
            record, more = membership.lost(record, now_s)
            state = state.with_learner(record)
            effects += more
        else:
            next_expiry_s = min(next_expiry_s, expiry_s)
    return state, effects, next_expiry_s


def _phase(state: RunState, now_s: float) -> tuple[RunState, list[Effect]]:
    if state.phase not in (Phase.WAITING, Phase.TRAINING):
        return state, []
    live, wanted = len(state.live_learners), state.spec.min_learners
    if live >= wanted and state.tokens_trained >= state.spec.budget_tokens:
        until_s = now_s + state.spec.closing_lap_s
        lap = tuple(range(len(state.fragments)))
        state = replace(state, closing_until_s=until_s, due=lap)
        reason = f"the budget of {state.spec.budget_tokens} tokens is trained"
        state, _, effects = _enter(state, Phase.CLOSING, reason)
        return state, effects
    count = f"{live} live learner{'' if live == 1 else 's'}"
    if live < wanted:
        reason = f"{count} of at least {wanted}{admin.remark(state)}"
        if state.phase is Phase.WAITING:
            return replace(state, phase_reason=reason), []
        state, _, effects = _enter(replace(state, due=()), Phase.WAITING, reason)
        return state, effects
    reason = f"{count}{admin.remark(state)}"
    if state.phase is Phase.TRAINING:
        return replace(state, phase_reason=reason), []
    state, _, effects = _enter(state, Phase.TRAINING, reason)
    return state, effects


def _finish(state: RunState, now_s: float) -> tuple[RunState, list[Effect]]:
    """The closing lap is over once no round is open or due, or its time is up."""
    if state.phase is not Phase.CLOSING or state.open_rounds:
        return state, []
    if state.due and now_s < state.closing_until_s:
        return state, []
    discarded = tuple(m.key for f in state.fragments for m in f.arrived)
    reason = f"budget trained, {state.rounds_merged} rounds merged, {len(discarded)} left over"
    fragments = tuple(replace(f, arrived=()) for f in state.fragments)
    state = replace(state, due=(), fragments=fragments)
    state, _, effects = _enter(state, Phase.FINISHED, reason)
    return state, [Discard(discarded), *effects]


def _enter(state: RunState, phase: Phase, reason: str) -> tuple[RunState, Reply, list[Effect]]:
    state = replace(state, phase=phase, phase_reason=reason)
    note = Note("phase", reason, (("phase", str(phase)),))
    return state, None, [note, Send(None, membership.progress(state))]
