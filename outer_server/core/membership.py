"""Joining, leaving, and how silence becomes absence."""

from __future__ import annotations

import re
from dataclasses import replace

from fragments.records import (
    PROTOCOL_VERSION,
    Goodbye,
    Hello,
    Lease,
    Progress,
    Refusal,
    RefusalCode,
    Report,
    Role,
    Version,
    Welcome,
)
from outer_server.core.events import Disconnect, Effect, Join, Leave, Note
from outer_server.core.state import Base, LearnerRecord, RunState, Tally, Timing

HEARTBEATS_PER_LEASE = 3
"""A learner is heard at least this often within its lease's time to live."""

MAX_TEXT = 128
"""Longest text of a caller that is kept or repeated."""

MAX_STEPS = 1 << 32
"""More steps or batches than this are not made by one process of ours."""

REPLACED_KEPT = 16
"""Incarnations of a name that are remembered as replaced."""

PASSED_OVER_KEPT = 16
"""Times that a process of a name went on from a checkpoint for which it is remembered what it left
out."""

MAX_EVALUATORS = 16
"""Names of evaluators that a run takes."""

_NAME = re.compile(r"^[A-Za-z0-9_.-]{1,64}$")


def join(
    state: RunState, event: Join, now_s: float, layout_digest: str
) -> tuple[RunState, Welcome | Refusal, list[Effect]]:
    """Grant a lease or say why not. A newer process of a name fences the older off."""
    hello = event.hello
    refusal = _check(state, hello, layout_digest)
    if refusal is not None:
        note = Note("join_refused", refusal.reason, (("learner", hello.name),))
        return state, refusal, [note]
    before = state.learners.get(hello.name)
    effects: list[Effect] = []
    retired: LearnerRecord | None = None
    if before is None and _is_full(state, hello.role):
        retired = _retiring(state, hello.role)
    if retired is not None:
        others = {name: r for name, r in state.learners.items() if name != retired.name}
        state = replace(state, learners=others)
        reason = f"{hello.name!r} takes its place and goes on with its data"
        effects.append(Note("retired", reason, (("learner", retired.name),)))
    record = _admit(state, hello, before, now_s)
    if retired is not None:
        # The same shard, from where it was left: nothing of it is trained twice.
        record = replace(record, cursor=max(record.cursor, retired.cursor))
    record = _passing_over(record, before, hello)
    state = replace(state.with_learner(record), next_token=state.next_token + 1)
    state = _excuse(state, record)
    if before is not None and before.live and before.incarnation != hello.incarnation:
        fenced = _fenced(hello.name)
        effects.append(Disconnect(hello.name, Goodbye(fenced.code, fenced.reason)))
    what = "joined" if before is None else "rejoined"
    reason = "newcomer" if before is None else f"join {record.tally.joins} of this name"
    fields = (("learner", hello.name), ("role", str(hello.role)), ("token", record.token))
    effects.append(Note(what, reason, fields))
    return state, welcome(state, record), effects


def _excuse(state: RunState, record: LearnerRecord) -> RunState:
    """A process that joins without the base that its name was asked for will not answer soon."""
    for index, fragment in enumerate(state.fragments):
        round_ = fragment.round
        if round_ is None or record.name not in round_.asked or record.bases[index].version >= 0:
            continue
        round_ = replace(round_, declined=round_.declined | {record.name})
        state = state.with_fragment(index, replace(fragment, round=round_))
    return state


def welcome(state: RunState, record: LearnerRecord) -> Welcome:
    """What a freshly admitted process is told."""
    ttl_s = state.spec.lease_ttl_s
    return Welcome(
        lease=Lease(record.name, record.token, ttl_s),
        generation=state.generation,
        epoch=state.epoch,
        phase=state.phase,
        versions=tuple(fragment.version for fragment in state.fragments),
        consumed=tuple(base.consumed for base in record.bases),
        shard_index=record.shard_index,
        shard_count=state.spec.max_learners,
        cursor=record.cursor,
        global_step=state.global_step,
        tokens_trained=state.tokens_trained,
        heartbeat_s=ttl_s / HEARTBEATS_PER_LEASE,
    )


def leave(state: RunState, event: Leave) -> tuple[RunState, list[Effect]]:
    """The holder gives its lease back; anyone else's word counts nothing."""
    record = state.learners.get(event.learner)
    if record is None or not record.live or record.token != event.token:
        return state, []
    state = state.with_learner(replace(ended(record), left=True))
    return state, [Note("left", event.reason[:MAX_TEXT], (("learner", event.learner),))]


def lost(record: LearnerRecord, now_s: float) -> tuple[LearnerRecord, list[Effect]]:
    """A record whose lease has lapsed, and what to say of it."""
    reason = f"nothing heard for {now_s - record.heard_at_s:.1f} s"
    goodbye = Goodbye(RefusalCode.LEASE_LOST, f"the lease lapsed: {reason}; join again")
    return ended(record), [
        Note("lost", reason, (("learner", record.name),)),
        Disconnect(record.name, goodbye),
    ]


def ended(record: LearnerRecord) -> LearnerRecord:
    """A record without a lease."""
    return replace(record, live=False, stepped_at_s=None, has_stepped=False)


def check_lease(state: RunState, learner: str, token: int) -> Refusal | None:
    """None where `token` may speak for `learner`, otherwise why not."""
    refusal = evicted(state, learner)
    if refusal:
        return Refusal(RefusalCode.EVICTED, refusal)
    record = state.learners.get(learner)
    if record is None:
        return Refusal(RefusalCode.LEASE_LOST, f"no lease of {learner!r} is known: join again")
    if token != record.token:
        if token > record.token:
            return Refusal(RefusalCode.LEASE_LOST, "this lease is not known here: join again")
        return _fenced(learner)
    if not record.live:
        return Refusal(RefusalCode.LEASE_LOST, f"the lease of {learner!r} lapsed: join again")
    return None


def evicted(state: RunState, learner: str) -> str:
    """Why an operator refuses this name, as a sentence; "" where none does."""
    eviction = state.evicted.get(learner)
    if eviction is None:
        return ""
    return (
        f"{learner!r} was evicted by an operator{because(eviction.reason)}: "
        f"`diloco admin release {learner}` lets it join again"
    )


def because(reason: str) -> str:
    """An operator's reason after the sentence that it belongs to; nothing where there is none."""
    text = " ".join(reason.split())[:MAX_TEXT]
    return f" ({text})" if text else ""


def _fenced(learner: str) -> Refusal:
    reason = f"another process joined as {learner!r} later: this one is fenced off"
    return Refusal(RefusalCode.FENCED, reason)


def progress(state: RunState) -> Progress:
    """Clock and phase, as learners are told."""
    return Progress(
        state.global_step,
        state.tokens_trained,
        state.phase,
        state.slots.interval,
        state.spec.budget_tokens,
    )


def version_of(state: RunState, fragment: int) -> Version:
    """The newest version of a fragment."""
    return Version(state.epoch, state.fragments[fragment].version)


def _check(state: RunState, hello: Hello, layout_digest: str) -> Refusal | None:
    spec = state.spec
    mismatch: str | None = None
    if max(map(len, (hello.run_id, hello.layout_digest, hello.name, hello.incarnation))) > MAX_TEXT:
        mismatch = f"a name, run, digest or incarnation has more than {MAX_TEXT} characters"
    elif hello.cursor > MAX_STEPS or any(b.steps_since > MAX_STEPS for b in hello.bases):
        mismatch = f"a cursor or number of steps above {MAX_STEPS} is none of ours"
    elif hello.protocol_version != PROTOCOL_VERSION:
        mismatch = (
            f"protocol version {hello.protocol_version} is not the server's {PROTOCOL_VERSION}: "
            "run the same release on both sides"
        )
    elif hello.run_id != spec.run_id:
        mismatch = f"run {hello.run_id!r} is not trained here but {spec.run_id!r}: check --address"
    elif hello.layout_digest != layout_digest:
        mismatch = (
            "the model built here differs from the run's (layout digest "
            f"{hello.layout_digest[:12]} against {layout_digest[:12]}): check program and version"
        )
    elif not _NAME.fullmatch(hello.name):
        mismatch = f"name {hello.name!r}: use 1 to 64 of letters, digits, '-', '_' and '.'"
    elif hello.generation_seen > state.generation:
        mismatch = (
            f"this server is of generation {state.generation}, but the learner has seen "
            f"{hello.generation_seen}: an older copy of the run is being served here"
        )
    if mismatch is not None:
        return Refusal(RefusalCode.MISMATCH, mismatch)
    return _check_welcome(state, hello)


def _check_welcome(state: RunState, hello: Hello) -> Refusal | None:
    """Whether a process that fits the run may join it now."""
    before = state.learners.get(hello.name)
    if before is not None and before.role is not hello.role:
        return Refusal(RefusalCode.MISMATCH, f"{hello.name!r} is known here as {before.role}")
    if before is not None and hello.incarnation in before.replaced:
        # It may have heard only that its lease had lapsed, from before the later one joined.
        return _fenced(hello.name)
    refusal = evicted(state, hello.name)
    if refusal:
        return Refusal(RefusalCode.EVICTED, refusal)
    if state.stopping:
        return Refusal(RefusalCode.NOT_TRAINING, "the server is about to stop: try again later")
    if before is None and _is_full(state, hello.role) and _retiring(state, hello.role) is None:
        most = _most(state, hello.role)
        return Refusal(RefusalCode.FULL, f"the run has its {most} {hello.role}s already")
    return None


def _most(state: RunState, role: Role) -> int:
    return state.spec.max_learners if role is Role.LEARNER else MAX_EVALUATORS


def _is_full(state: RunState, role: Role) -> bool:
    names = sum(1 for record in state.learners.values() if record.role is role)
    return names >= _most(state, role)


def _retiring(state: RunState, role: Role) -> LearnerRecord | None:
    """The name that a newcomer to a full run takes the place of: the one gone longest of which
    nothing waits to be merged; None where there is none.
    """
    waiting = {m.key.learner for f in state.fragments for m in f.arrived}
    waiting |= {m.key.learner for r in state.open_rounds if r.order for m in r.order.contributions}
    gone = [
        record
        for record in state.learners.values()
        if record.role is role and not record.live and record.name not in waiting
    ]
    return min(gone, key=lambda record: (record.heard_at_s, record.name), default=None)


def _admit(
    state: RunState, hello: Hello, before: LearnerRecord | None, now_s: float
) -> LearnerRecord:
    is_same_process = before is not None and before.incarnation == hello.incarnation
    has_trained = bool(hello.bases) or hello.cursor > 0
    # A process that joins again goes on counting where it was, so that what it trained meanwhile
    # is counted with its next report.
    nothing = Report(step=0, tokens=0, cursor=0)
    report = before.report if before is not None and is_same_process else nothing
    held = {base.fragment: base for base in hello.bases if base.version.epoch == state.epoch}
    old = before.bases if before is not None else _unknown_bases(state)
    bases = []
    for index, base in enumerate(old):
        now_held = held.get(index)
        if now_held is None or now_held.version.number > state.fragments[index].version:
            bases.append(replace(base, version=-1, at_step=0, digest=""))
        else:
            version = now_held.version.number
            digest = base.digest if base.version == version else ""
            at_step = report.step - now_held.steps_since
            bases.append(replace(base, version=version, at_step=at_step, digest=digest))
    tally = before.tally if before is not None else Tally()
    replaced = before.replaced if before is not None else ()
    if before is not None and not is_same_process:
        replaced = (*replaced, before.incarnation)[-REPLACED_KEPT:]
        tally = replace(
            tally,
            steps=tally.steps + before.report.step,
            tokens=tally.tokens + before.report.tokens,
        )
    return LearnerRecord(
        name=hello.name,
        role=hello.role,
        token=state.next_token,
        incarnation=hello.incarnation,
        shard_index=before.shard_index if before is not None else _free_shard(state, hello.role),
        live=True,
        left=False,
        position=state.global_step,
        report=report,
        heard_at_s=now_s,
        bases=tuple(bases),
        starts_count=before.starts_count if before and is_same_process else has_trained,
        stepped_at_s=now_s if all(base.version >= 0 for base in bases) else None,
        cursor=max(hello.cursor, before.cursor if before is not None else 0),
        timing=before.timing if before is not None else Timing(),
        tally=replace(tally, joins=tally.joins + 1),
        replaced=replaced,
    )


def _passing_over(
    record: LearnerRecord, before: LearnerRecord | None, hello: Hello
) -> LearnerRecord:
    """A new process may build on its checkpoint, and goes on behind all that was trained since."""
    passed_over = before.passed_over if before is not None else ()
    is_same_process = before is not None and before.incarnation == hello.incarnation
    span = (hello.cursor, record.cursor)
    if not is_same_process and hello.cursor < record.cursor and span not in passed_over[-1:]:
        passed_over = (*passed_over, span)[-PASSED_OVER_KEPT:]
    return replace(record, passed_over=passed_over)


def _unknown_bases(state: RunState) -> tuple[Base, ...]:
    """Of a name without a record: a newcomer's, or one's that was retired while its process lived.

    Nothing of a name waits when it is retired, so whatever it had contributed is in the versions up
    to now: all bases before them count as consumed, and nothing is merged twice.
    """
    return tuple(Base(consumed=fragment.version - 1) for fragment in state.fragments)


def _free_shard(state: RunState, role: Role) -> int:
    """The lowest data shard that no learner ever had; evaluators have none (0)."""
    if role is Role.EVALUATOR:
        return 0
    used = {r.shard_index for r in state.learners.values() if r.role is Role.LEARNER}
    return next(index for index in range(state.spec.max_learners) if index not in used)
