"""The run's status, made from an immutable state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from fragments.digest import combine
from fragments.layout import Layout
from fragments.payload import Payload
from fragments.records import (
    EvaluationStatus,
    FragmentStatus,
    LearnerState,
    LearnerStatus,
    Role,
    RunStatus,
)
from outer_server.core.state import LearnerRecord, RunState


def payload_digest(payload: Payload) -> str:
    """Sha256 of a payload's bytes and codec: tells a repetition from another contribution."""
    found = hashlib.sha256(payload.codec.encode() + b"\0")
    found.update(payload.data)
    return found.hexdigest()


def run_status(
    state: RunState,
    layout: Layout,
    traffic: Mapping[str, tuple[int, int]],
    now_s: float,
    tokens_per_s: float,
) -> RunStatus:
    """What `diloco status` shows. `traffic`: bytes (up, down) by name.

    Every fragment pushes and merges the same trained tokens once: the counters of pushed and
    merged tokens are means over fragments, so that they compare with those of trained tokens.
    """
    learners = [r for _, r in sorted(state.learners.items()) if r.role is Role.LEARNER]
    weights_digest = combine(
        (state.epoch, index, fragment.version, fragment.digest)
        for index, fragment in enumerate(state.fragments)
    )
    return RunStatus(
        run_id=state.spec.run_id,
        phase=state.phase,
        phase_reason=state.phase_reason,
        generation=state.generation,
        epoch=state.epoch,
        global_step=state.global_step,
        tokens_trained=state.tokens_trained,
        tokens_pushed=state.tokens_pushed // len(state.fragments),
        tokens_merged=state.tokens_merged // len(state.fragments),
        tokens_budget=state.spec.budget_tokens,
        rounds_merged=state.rounds_merged,
        rounds_abandoned=state.rounds_abandoned,
        uptime_s=now_s,
        tokens_per_s=tokens_per_s,
        bytes_up=sum(up for up, _ in traffic.values()),
        bytes_down=sum(down for _, down in traffic.values()),
        sync_interval_steps=state.slots.interval,
        weights_digest=weights_digest,
        fragments=_fragments(state, layout),
        learners=tuple(_learner(state, r, traffic.get(r.name, (0, 0)), now_s) for r in learners),
        evaluations=tuple(
            EvaluationStatus(
                e.evaluation.loss,
                e.evaluation.unit,
                e.evaluation.global_step,
                e.evaluation.tokens_trained,
                e.at_s,
                e.evaluator,
            )
            for e in state.evaluations
        ),
    )


def _fragments(state: RunState, layout: Layout) -> tuple[FragmentStatus, ...]:
    return tuple(
        FragmentStatus(
            fragment=index,
            version=fragment.version,
            digest=fragment.digest,
            num_values=layout.fragments[index].num_values,
            open=fragment.round is not None,
            asked=len(fragment.round.asked) if fragment.round is not None else 0,
            answered=len(fragment.round.answered) if fragment.round is not None else 0,
        )
        for index, fragment in enumerate(state.fragments)
    )


def _learner(
    state: RunState, record: LearnerRecord, traffic: tuple[int, int], now_s: float
) -> LearnerStatus:
    tally, report = record.tally, record.report
    held = [base for base in record.bases if base.version >= 0]
    behind = [
        fragment.version - base.version
        for fragment, base in zip(state.fragments, record.bases, strict=True)
        if base.version >= 0
    ]
    digest = ""
    if len(held) == len(record.bases) and all(base.digest for base in held):
        digest = combine(
            (state.epoch, index, base.version, base.digest)
            for index, base in enumerate(record.bases)
        )
    return LearnerStatus(
        name=record.name,
        state=_state(state, record),
        token=record.token,
        position=record.position,
        steps=tally.steps + report.step,
        tokens=tally.tokens + report.tokens,
        cursor=record.cursor,
        joins=tally.joins,
        contributions_merged=tally.contributions_merged,
        tokens_merged=tally.tokens_merged // len(state.fragments),
        contributions_late=tally.contributions_late,
        contributions_refused=tally.contributions_refused,
        staleness=max(behind, default=0),
        silent_s=max(0.0, now_s - record.heard_at_s),
        step_s=report.step_s,
        wait_share=report.wait_share,
        loss=report.loss,
        bytes_up=traffic[0],
        bytes_down=traffic[1],
        weights_digest=digest,
        cap_up_mbit=report.cap_up_mbit,
        cap_down_mbit=report.cap_down_mbit,
        use_up_mbit=report.use_up_mbit if record.live else 0.0,
        use_down_mbit=report.use_down_mbit if record.live else 0.0,
        outruns=record.live and report.outruns,
    )


def _state(state: RunState, record: LearnerRecord) -> LearnerState:
    if record.name in state.evicted:
        return LearnerState.EVICTED
    if record.live:
        return LearnerState.TRAINING if record.has_stepped else LearnerState.JOINED
    return LearnerState.LEFT if record.left else LearnerState.LOST
