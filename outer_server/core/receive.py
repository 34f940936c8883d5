"""Facts that learners report, put into the state. Nothing is decided here."""

from __future__ import annotations

import math
from dataclasses import replace

from fragments.records import (
    DeclineReason,
    Goodbye,
    Phase,
    Receipt,
    Refusal,
    RefusalCode,
    Report,
    Role,
    Version,
)
from fragments.runspec import LARGEST_BUDGET
from outer_server.core.close import contributors, longest_wait_steps, observe, smoothed
from outer_server.core.events import (
    Contributed,
    Declined,
    Disconnect,
    Effect,
    Evaluated,
    HasAdopted,
    Note,
    Reported,
)
from outer_server.core.membership import MAX_STEPS, MAX_TEXT, check_lease
from outer_server.core.resume import begin_epoch
from outer_server.core.state import (
    ContributionMeta,
    EvaluationRecord,
    LearnerRecord,
    RoundStage,
    RunState,
)

EVALUATIONS_KEPT = 512
"""Newest evaluations kept for the status."""

MAX_TOKENS = 1 << 56
"""More tokens than this are not trained by one process of ours."""

MAX_EPOCHS_AHEAD = 1 << 20
"""No copy of a run is that much older than another."""

DROPPED = Refusal(RefusalCode.STALE, "its round has closed, and late ones are dropped")
"""Said of a late contribution in a run with late="drop", however often it comes."""


def heard(state: RunState, learner: str, token: int, now_s: float) -> RunState | None:
    """The state with this learner heard from; None if it may not speak."""
    if check_lease(state, learner, token) is not None:
        return None
    record = state.learners[learner]
    return state.with_learner(replace(record, heard_at_s=now_s))


def report(state: RunState, event: Reported, now_s: float) -> RunState:
    """Move the learner on. Reports are cumulative: an older one changes nothing.

    The first report of a lease moves the learner by one step, at least to t,
    whatever it has trained while it was away; its tokens count in full.
    """
    record = state.learners[event.learner]
    new, old = event.report, record.report
    steps, tokens = new.step - old.step, new.tokens - old.tokens
    is_sane = steps >= 0 and tokens >= 0 and new.step <= MAX_STEPS and new.tokens <= MAX_TOKENS
    if record.role is not Role.LEARNER or not is_sane or not 0 <= new.cursor <= MAX_STEPS:
        return state
    if record.starts_count:
        record = _count_from(record, steps, tokens)
        steps = tokens = 0
    if steps > 0:
        position = record.position + (steps if record.has_stepped else 1)
        position = position if record.has_stepped else max(state.global_step, position)
        record = replace(record, position=position, stepped_at_s=now_s, has_stepped=True)
    record = replace(record, report=_shown(new), cursor=max(record.cursor, new.cursor))
    state = state.with_learner(record)
    return replace(state, tokens_trained=min(LARGEST_BUDGET, state.tokens_trained + tokens))


def _count_from(record: LearnerRecord, steps: int, tokens: int) -> LearnerRecord:
    """Go on counting without what a process says on its first report that it trained before."""
    tally = record.tally
    tally = replace(tally, steps=tally.steps - steps, tokens=tally.tokens - tokens)
    return replace(record, tally=tally, starts_count=False)


def _shown(new: Report) -> Report:
    """The report with what is only shown made finite."""
    return replace(
        new,
        wait_share=_finite(new.wait_share),
        step_s=_finite(new.step_s),
        cap_up_mbit=_finite(new.cap_up_mbit),
        cap_down_mbit=_finite(new.cap_down_mbit),
        use_up_mbit=_finite(new.use_up_mbit),
        use_down_mbit=_finite(new.use_down_mbit),
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value >= 0.0 else 0.0


def decline(state: RunState, event: Declined) -> tuple[RunState, list[Effect]]:
    """Count the learner out of the round that it was asked for, if that is still open.

    One that has contributed on the base that it is asked for, of which nothing is known here, has
    it from before a journal lost its end (or was refused, which it was told). It joins again, hears
    that its base is not consumed, and answers anew, with all that it has trained on it.
    """
    asked = event.decline
    if not 0 <= asked.fragment < len(state.fragments):
        return state, []
    state, effects = _count_out(state, event)
    base = state.learners[event.learner].bases[asked.fragment]
    # It may have adopted another base since: of that it says nothing. Nor is that any proof which
    # may have been refused as too old, or answers a round that is over.
    is_of_base = asked.consumed_base == Version(state.epoch, base.version)
    is_fresh = state.fragments[asked.fragment].version - base.version <= state.spec.staleness_bound
    is_proof = asked.reason is DeclineReason.CONSUMED and bool(effects) and is_of_base and is_fresh
    if is_proof and base.version > base.consumed:
        reason = (
            f"{event.learner} has contributed on version {base.version} of fragment"
            f" {asked.fragment}, and nothing is known of it here: it is to answer anew"
        )
        fields = (("learner", event.learner), ("fragment", asked.fragment))
        goodbye = Goodbye(RefusalCode.LEASE_LOST, f"{reason}; join again")
        effects += [Note("contribution_lost", reason, fields), Disconnect(event.learner, goodbye)]
    return state, effects


def _count_out(state: RunState, event: Declined) -> tuple[RunState, list[Effect]]:
    asked = event.decline
    fragment = state.fragments[asked.fragment]
    round_ = fragment.round
    wanted = Version(state.epoch, round_.version) if round_ is not None else None
    if round_ is None or asked.version != wanted or round_.stage is not RoundStage.COLLECTING:
        return state, []
    round_ = replace(round_, declined=round_.declined | {event.learner})
    state = state.with_fragment(asked.fragment, replace(fragment, round=round_))
    fields = (("learner", event.learner), ("fragment", asked.fragment))
    return state, [Note("declined", str(asked.reason), fields)]


def adopted(state: RunState, event: HasAdopted, now_s: float) -> tuple[RunState, list[Effect]]:
    """Note the base; end the stream of a learner whose copy differs from the server's. Its lease
    stays until it joins again, which the goodbye has it do, or lapses.
    """
    told = event.adopted
    if not 0 <= told.fragment < len(state.fragments) or told.version.epoch < state.epoch:
        return state, []
    is_sane = (
        len(told.digest) <= MAX_TEXT
        and 0 <= told.at_step <= MAX_STEPS
        and told.version.epoch <= state.epoch + MAX_EPOCHS_AHEAD
    )
    if state.learners[event.learner].role is not Role.LEARNER or not is_sane:
        return state, []
    fragment = state.fragments[told.fragment]
    if told.version.epoch > state.epoch:
        return _lost(state, event, fragment.version)
    record = state.learners[event.learner]
    base = record.bases[told.fragment]
    if told.version.number < base.version:
        return state, []
    if told.version.number > fragment.version:
        return _lost(state, event, fragment.version)
    known = fragment.digest_of(told.version.number)
    if known not in (None, told.digest):
        reason = f"{_other_values(told.fragment, told.version, known)}, not {told.digest}"
        goodbye = Goodbye(RefusalCode.BAD_PAYLOAD, reason)
        fields = (("learner", event.learner), ("fragment", told.fragment))
        return state, [Note("digest_mismatch", reason, fields), Disconnect(event.learner, goodbye)]
    base = replace(base, version=told.version.number, at_step=told.at_step, digest=told.digest)
    record = record.with_base(told.fragment, base)
    # It may step again; where it may not, it says so again.
    record = replace(record, report=replace(record.report, paused=False))
    if record.stepped_at_s is None and all(held.version >= 0 for held in record.bases):
        position = max(state.global_step, record.position)
        record = replace(record, stepped_at_s=now_s, position=position)
    state = state.with_learner(record)
    if fragment.closed_at_s is not None and told.version.number == fragment.version:
        averages = state.averages
        sync_s = smoothed(averages.sync_s, now_s - fragment.closed_at_s)
        state = replace(state, averages=replace(averages, sync_s=sync_s))
        state = state.with_fragment(told.fragment, replace(fragment, closed_at_s=None))
    return state, []


def _lost(state: RunState, event: HasAdopted, newest: int) -> tuple[RunState, list[Effect]]:
    """Somebody trains on a version that is not there (yet): this server goes on from less than was
    published, as a journal that lost its end leaves it, or an older copy put in its place. No
    version's name may stand for two values, so an epoch begins that nobody has heard of.
    """
    told = event.adopted
    reason = (
        f"{event.learner} holds version {told.version} of fragment {told.fragment}, and the newest "
        f"that is known here is {Version(state.epoch, newest)}: the journal has lost its end, or an"
        " older copy of the run is served"
    )
    goodbye = Goodbye(RefusalCode.LEASE_LOST, f"{reason}; join again")
    fields = (("learner", event.learner), ("fragment", told.fragment))
    note = Note("version_lost", reason, fields)
    if state.stopping or state.phase is Phase.FINISHED:
        return state, [note, Disconnect(event.learner, goodbye)]
    live = [name for name, record in sorted(state.learners.items()) if record.live]
    epoch = max(state.epoch, told.version.epoch) + 1
    state = begin_epoch(state, epoch, f"epoch {epoch} has begun: {reason}")
    note = Note("version_lost", reason, (*fields, ("epoch", state.epoch)))
    return state, [note, *(Disconnect(name, goodbye) for name in live)]


def evaluated(state: RunState, event: Evaluated, now_s: float) -> tuple[RunState, list[Effect]]:
    """Keep an evaluator's held-out loss for the status."""
    told = event.evaluation
    is_sane = len(told.unit) <= MAX_TEXT and len(told.versions) <= len(state.fragments)
    if state.learners[event.learner].role is not Role.EVALUATOR or not is_sane:
        return state, []
    entry = EvaluationRecord(event.learner, now_s, event.evaluation)
    kept = (*state.evaluations, entry)[-EVALUATIONS_KEPT:]
    fields = (
        ("loss", event.evaluation.loss),
        ("tokens_trained", event.evaluation.tokens_trained),
    )
    return replace(state, evaluations=kept), [Note("evaluated", event.evaluation.unit, fields)]


def admissible(state: RunState, event: Contributed) -> Refusal | Receipt | None:
    """None where a contribution would be new and welcome; otherwise the answer to it."""
    key = event.meta.key
    refusal = check_lease(state, event.learner, event.token)
    if refusal is not None:
        return refusal
    if state.learners[event.learner].role is not Role.LEARNER:
        return Refusal(RefusalCode.MISMATCH, f"{event.learner!r} is no learner")
    if key.learner != event.learner or not 0 <= key.fragment < len(state.fragments):
        return Refusal(RefusalCode.MISMATCH, f"no such key: {key}")
    if key.base_version.epoch != state.epoch:
        reason = f"epoch {key.base_version.epoch} was rolled back; now is {state.epoch}"
        return Refusal(RefusalCode.OLD_EPOCH, reason)
    base = state.learners[event.learner].bases[key.fragment]
    number, current = key.base_version.number, state.fragments[key.fragment].version
    if number <= base.consumed:
        if number == base.consumed and event.payload_digest == base.consumed_payload:
            return DROPPED if base.dropped else Receipt(key, duplicate=True)
        reason = f"base {key.base_version} of fragment {key.fragment} was consumed already"
        return Refusal(RefusalCode.CONSUMED, reason)
    if number > current or not _is_sane(event.meta) or len(event.base_digest) > MAX_TEXT:
        reason = f"base {number} at version {current} with {event.meta.steps} steps makes no sense"
        return Refusal(RefusalCode.MISMATCH, reason)
    stale = staleness(state, event.meta)
    if stale is not None:
        return Refusal(RefusalCode.STALE, stale)
    known = state.fragments[key.fragment].digest_of(number)
    if event.base_digest and known not in (None, event.base_digest):
        return Refusal(
            RefusalCode.BAD_PAYLOAD, _other_values(key.fragment, key.base_version, known)
        )
    if state.phase is Phase.FINISHED:
        return Refusal(RefusalCode.NOT_TRAINING, "the run is finished")
    return None


def _other_values(fragment: int, version: Version, known: str | None) -> str:
    """What is said of a copy that has the name of a version and not its bits."""
    return f"fragment {fragment} at version {version} has the digest {known} here: pull full values"


def staleness(state: RunState, meta: ContributionMeta) -> str | None:
    """The sentence that refuses a contribution more versions behind than the bound; None within."""
    number, current = meta.key.base_version.number, state.fragments[meta.key.fragment].version
    bound = state.spec.staleness_bound
    if current - number <= bound:
        return None
    return f"base {number} is {current - number} versions behind, the bound is {bound}"


def _is_sane(meta: ContributionMeta) -> bool:
    has_work = 1 <= meta.steps <= MAX_STEPS and 1 <= meta.tokens <= MAX_TOKENS
    return has_work and 0 <= meta.cursor_from <= meta.cursor_to <= MAX_STEPS


def contribute(
    state: RunState, event: Contributed, now_s: float
) -> tuple[RunState, Receipt | Refusal, list[Effect]]:
    """Take a contribution, once. Late ones wait for the next round of their fragment."""
    answer = admissible(state, event)
    if isinstance(answer, Receipt):
        return state, answer, []
    if isinstance(answer, Refusal):
        return (state, answer, []) if answer is DROPPED else _count_refused(state, event, answer)
    key = event.meta.key
    fragment = state.fragments[key.fragment]
    round_ = fragment.round
    is_late = (
        round_ is None
        or round_.stage is not RoundStage.COLLECTING
        or event.asked_version != Version(state.epoch, round_.version)
    )
    record = _consumed(state, event, now_s, late=is_late)
    if is_late and state.spec.late == "drop":
        return _count_refused(state.with_learner(record), event, DROPPED)
    if round_ is not None and not is_late:
        round_ = replace(round_, answered=round_.answered | {event.learner})
    fragment = replace(fragment, round=round_, arrived=(*fragment.arrived, event.meta))
    state = state.with_learner(record).with_fragment(key.fragment, fragment)
    state = _note_quorum(state, key.fragment, now_s)
    pushed = min(LARGEST_BUDGET, state.tokens_pushed + event.meta.tokens)
    state = replace(state, tokens_pushed=pushed)
    return state, Receipt(key, late=is_late), []


def _note_quorum(state: RunState, index: int, now_s: float) -> RunState:
    """Time the K_eff-th answer of an open round, once."""
    fragment = state.fragments[index]
    round_ = fragment.round
    if round_ is None or round_.quorum_at_s is not None:
        return state
    if len(contributors(state, index)) < state.quorum_effective:
        return state
    averages = state.averages
    quorum_s = smoothed(averages.quorum_s, now_s - round_.opened_at_s)
    round_ = replace(round_, quorum_at_s=now_s)
    state = state.with_fragment(index, replace(fragment, round=round_))
    return replace(state, averages=replace(averages, quorum_s=quorum_s))


def _consumed(state: RunState, event: Contributed, now_s: float, *, late: bool) -> LearnerRecord:
    record, key = state.learners[event.learner], event.meta.key
    base = record.bases[key.fragment]
    timing = record.timing
    if base.asked_version == event.asked_version.number:
        # 0 before the clock has a pace: then every answer is in time.
        longest_s = longest_wait_steps(state) * state.averages.step_s if late else math.inf
        timing = observe(timing, now_s - base.asked_at_s, longest_s or math.inf)
    base = replace(
        base,
        consumed=key.base_version.number,
        consumed_payload=event.payload_digest,
        dropped=late and state.spec.late == "drop",
    )
    tally = replace(record.tally, contributions_late=record.tally.contributions_late + late)
    # A push may outrun the report of its last step: a process that follows must not train it again.
    cursor = max(record.cursor, event.meta.cursor_to)
    record = record.with_base(key.fragment, base)
    return replace(record, timing=timing, tally=tally, cursor=cursor)


def _count_refused(
    state: RunState, event: Contributed, refusal: Refusal
) -> tuple[RunState, Refusal, list[Effect]]:
    record = state.learners.get(event.learner)
    is_holder = record is not None and record.token == event.token
    counted, note = refused(state, event.learner, event.meta.key.fragment, refusal.reason)
    return counted if is_holder else state, refusal, [note]


def refused(state: RunState, learner: str, fragment: int, reason: str) -> tuple[RunState, Note]:
    """Count a contribution that is not merged, and the note that says why."""
    note = Note("contribution_refused", reason, (("learner", learner), ("fragment", fragment)))
    record = state.learners.get(learner)
    if record is None:
        return state, note
    tally = replace(record.tally, contributions_refused=record.tally.contributions_refused + 1)
    return state.with_learner(replace(record, tally=tally)), note
