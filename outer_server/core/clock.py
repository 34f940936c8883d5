"""The run's clock: global step t, positions, and the slots at which fragments are due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outer_server.core.close import smoothed
from outer_server.core.state import LearnerRecord, RunState, SlotClock

STEPS_OF_PATIENCE = 4.0
"""Of its own steps, beyond a lease, that a learner may take for one and still move the clock."""


def kth_largest(positions: Sequence[int], k: int) -> int:
    """The k-th largest of `positions` (1 <= k <= len)."""
    return sorted(positions, reverse=True)[k - 1]


def advance(state: RunState, now_s: float) -> RunState:
    """Set t to the K_eff-th largest position among stepping learners; t never falls.

    Where a death would put the K_eff-th position below t, all their positions
    shift up by the difference, so that the survivors' next steps count at once.
    """
    state = _lift_paused(state)
    stepping = [record for record in state.live_learners if is_stepping(state, record, now_s)]
    if not stepping:
        return state
    quorum = min(state.spec.quorum, len(stepping))
    reached = kth_largest([record.position for record in stepping], quorum)
    if reached >= state.global_step:
        return _stepped(state, reached, now_s)
    shift = state.global_step - reached
    moved = {r.name: replace(r, position=r.position + shift) for r in stepping}
    return replace(state, learners={**state.learners, **moved})


def _lift_paused(state: RunState) -> RunState:
    """Take those who may not step on what they hold to the next slot: nothing else would.

    Steps that were made before a lease's first report, or while nobody heard, count less than they
    are; all might then wait for a slot that their counted steps do not reach.
    """
    if state.open_rounds:
        return state
    step = slot_step(state.slots, state.slots.next_slot, len(state.fragments))
    newest = [fragment.version for fragment in state.fragments]
    for record in state.live_learners:
        is_held = record.report.paused and [base.version for base in record.bases] == newest
        if is_held and record.position < step:
            state = state.with_learner(replace(record, position=step))
    return state


def is_stepping(state: RunState, record: LearnerRecord, now_s: float) -> bool:
    """Whether a live learner has a say on the clock: it has made a step in this lease, and the
    newest is no longer ago than a lease's time to live and four of its steps.

    A newcomer that still fetches its first weights must not stop the clock of K >= 2, and one
    whose training hangs while its heartbeat goes on must not hold that of K = 1.
    """
    if record.stepped_at_s is None:
        return False
    if record.report.paused:
        return True
    patience_s = state.spec.lease_ttl_s + STEPS_OF_PATIENCE * record.report.step_s
    return now_s - record.stepped_at_s <= patience_s


def _stepped(state: RunState, reached: int, now_s: float) -> RunState:
    """t moves to `reached`; what a step of the clock takes is averaged (xi_step)."""
    steps = reached - state.global_step
    if steps == 0:
        return state
    averages = state.averages
    if state.stepped_at_s is not None:
        sample_s = (now_s - state.stepped_at_s) / steps
        averages = replace(averages, step_s=smoothed(averages.step_s, sample_s))
    return replace(state, global_step=reached, averages=averages, stepped_at_s=now_s)


def slot_step(slots: SlotClock, slot: int, num_fragments: int) -> int:
    """Global step at which `slot` falls: offsets spread evenly over 0..H-1."""
    return slots.anchor_step + (slot - slots.anchor_slot) * slots.interval // num_fragments


def pass_slots(state: RunState) -> tuple[RunState, tuple[int, ...]]:
    """Move past all slots up to t; return the fragments that came due, oldest first.

    Slots passed in one jump count once per fragment. A new H takes effect at
    the last slot passed, so the order of fragments is never broken.
    """
    slots, num_fragments = state.slots, len(state.fragments)
    elapsed = state.global_step - slots.anchor_step
    # The largest x with x*H//P <= elapsed, in integers.
    last = slots.anchor_slot - (-(elapsed + 1) * num_fragments // slots.interval) - 1
    if last < slots.next_slot:
        return state, ()
    first = max(slots.next_slot, last - num_fragments + 1)
    due = tuple(slot % num_fragments for slot in range(first, last + 1))
    moved = replace(slots, next_slot=last + 1)
    if state.interval_steps != slots.interval:
        step = slot_step(slots, last, num_fragments)
        moved = SlotClock(last + 1, last, step, state.interval_steps)
    return replace(state, slots=moved), due
