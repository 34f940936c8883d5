"""The global step and the slots at which fragments are due, with numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fragments.records import Report
from outer_server.core import clock
from outer_server.core.state import LearnerRecord, RunState, new_state
from tests.support.records import learner_record
from tests.support.tiny import tiny_spec


def _stepping(name: str, position: int, *, live: bool = True) -> LearnerRecord:
    return learner_record(name, position=position, live=live, stepped_at_s=0.0)


def _state(positions: dict[str, int], *, quorum: int = 1, step: int = 0) -> RunState:
    state = new_state(tiny_spec(quorum=quorum), ["", ""], generation=1)
    learners = {name: _stepping(name, position) for name, position in positions.items()}
    return replace(state, learners=learners, global_step=step)


def test_the_global_step_is_the_kth_largest_position() -> None:
    positions = {"a": 9, "b": 7, "c": 2}
    assert clock.advance(_state(positions, quorum=1), 0.0).global_step == 9
    assert clock.advance(_state(positions, quorum=2), 0.0).global_step == 7
    assert clock.advance(_state(positions, quorum=3), 0.0).global_step == 2
    # K_eff = min(K, live).
    assert clock.advance(_state(positions, quorum=9), 0.0).global_step == 2


def test_after_the_fastest_dies_the_survivors_next_step_counts_at_once() -> None:
    state = _state({"fast": 40, "b": 10, "c": 9}, step=40)
    state = replace(state, learners={**state.learners, "fast": _stepping("fast", 40, live=False)})
    state = clock.advance(state, 0.0)
    assert state.global_step == 40
    assert (state.learners["b"].position, state.learners["c"].position) == (40, 39)
    stepped = replace(state.learners["b"], position=41)
    assert clock.advance(state.with_learner(stepped), 0.0).global_step == 41


def test_a_newcomer_without_a_step_does_not_stop_the_clock_of_all() -> None:
    state = _state({"a": 9, "b": 9, "new": 5}, quorum=3)
    state = state.with_learner(replace(state.learners["new"], stepped_at_s=None))
    assert clock.advance(state, 0.0).global_step == 9


def test_a_learner_that_stands_still_does_not_hold_the_clock() -> None:
    state = _state({"stuck": 40, "b": 10}, step=40)
    stuck = replace(state.learners["stuck"], report=Report(40, 640, 40, step_s=1.0))
    moving = replace(state.learners["b"], stepped_at_s=19.5)
    state = state.with_learner(stuck).with_learner(moving)
    # The lease is 15 s, and four of its steps are 4 s.
    assert clock.advance(state, 19.0).learners["b"].position == 10
    assert clock.advance(state, 19.5).learners["b"].position == 40


def _pass(state: RunState, step: int) -> tuple[RunState, tuple[int, ...]]:
    return clock.pass_slots(replace(state, global_step=step))


def test_fragments_come_due_evenly_spread_over_h() -> None:
    state = new_state(tiny_spec(fragments=4, sync_interval=24), [""] * 4, generation=1)
    found = []
    for step in range(1, 49):
        state, due = _pass(state, step)
        found += [(step, fragment) for fragment in due]
    assert found == [(6, 1), (12, 2), (18, 3), (24, 0), (30, 1), (36, 2), (42, 3), (48, 0)]


def test_an_interval_that_p_does_not_divide_keeps_its_length() -> None:
    state = new_state(tiny_spec(fragments=3, sync_interval=10), [""] * 3, generation=1)
    zero_at = []
    for step in range(1, 61):
        state, due = _pass(state, step)
        zero_at += [step for fragment in due if fragment == 0]
    assert zero_at == [10, 20, 30, 40, 50, 60]


def test_slots_passed_in_one_jump_open_once_per_fragment_oldest_first() -> None:
    state = new_state(tiny_spec(fragments=4, sync_interval=8), [""] * 4, generation=1)
    state, due = _pass(state, 1000 * 8 + 2)
    # The last slot passed is number 4001, of fragment 1.
    assert due == (2, 3, 0, 1)
    assert _pass(state, 1000 * 8 + 4)[1] == (2,)


def test_a_growing_h_takes_effect_without_breaking_the_order() -> None:
    spec = tiny_spec(fragments=2, sync_interval="0:4,0.5:12", budget_tokens=1000)
    state = new_state(spec, ["", ""], generation=1)
    order = []
    for step in range(1, 40):
        state = replace(state, tokens_trained=0 if step < 9 else 600)
        state, due = _pass(state, step)
        order += [(step, fragment) for fragment in due]
    assert order == [
        (2, 1), (4, 0), (6, 1), (8, 0), (10, 1), (16, 0), (22, 1), (28, 0), (34, 1),
    ]  # fmt: skip


@given(
    interval=st.integers(1, 50),
    num_fragments=st.integers(1, 12),
    jumps=st.lists(st.integers(1, 60), min_size=1, max_size=30),
)
def test_jumping_passes_the_same_slots_as_stepping(
    interval: int, num_fragments: int, jumps: list[int]
) -> None:
    spec = tiny_spec(fragments=num_fragments, sync_interval=interval)
    jumped = stepped = new_state(spec, [""] * num_fragments, generation=1)
    step = 0
    for jump in jumps:
        singly: list[int] = []
        for _ in range(jump):
            step += 1
            stepped, due = _pass(stepped, step)
            singly += due
        jumped, at_once = _pass(jumped, step)
        assert jumped.slots == stepped.slots
        assert at_once == tuple(dict.fromkeys(reversed(singly)))[::-1]
