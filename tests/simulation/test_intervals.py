"""Whatever befalls learners: no batch comes twice, and of those that never come it is known why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from outer_server.core.events import Effect, Event, Reply
from outer_server.core.intervals import Account, Reason, account
from outer_server.core.scheduler import Outcome
from simulation.run import simulate
from simulation.world import World
from tests.support.tiny import TinyProgram, tiny_spec

PROGRAM = TinyProgram(learning_rate=0.01)
LEARNERS = 3
STEPS = 48
"""About so many of each learner; a step takes a second."""

DEATHS_AND_CUTS = st.lists(
    st.tuples(
        st.integers(0, LEARNERS - 1),
        st.sampled_from(["death", "partition"]),
        st.sampled_from(["fresh", "moments", "kept"]),
        st.floats(1.0, 20.0),
        st.sampled_from([0.3, 2.0, 12.0]),
    ),
    max_size=9,
)


def _befalls(drawn: Sequence[tuple[int, str, str, float, float]]) -> list[dict[str, Any]]:
    """One after the other for each learner: each begins some time after the last one's end."""
    free_s = dict.fromkeys(range(LEARNERS), 0.0)
    events = []
    for learner, kind, returns, pause_s, length_s in drawn:
        at_s = free_s[learner] + pause_s
        free_s[learner] = at_s + length_s
        event = {
            "learner": learner,
            "kind": kind,
            "at": {"s": at_s},
            "until": {"s": at_s + length_s},
        }
        events.append(event | ({"returns": returns} if kind == "death" else {}))
    return events


def _account(world: dict[str, Any], **spec: Any) -> Account:
    tape: list[tuple[Event, Reply, Sequence[Effect]]] = []

    def note(event: Event, outcome: Outcome) -> None:
        tape.append((event, outcome.reply, outcome.effects))

    defaults: dict[str, Any] = {
        "budget_tokens": LEARNERS * STEPS * PROGRAM.tokens_per_step,
        "sync_interval": 6,
        "lease_ttl_s": 6.0,
    }
    simulate(
        tiny_spec(**defaults | spec),
        World.model_validate({"speeds": [1.0, 1.0, 0.4], "jitter": 0.1} | world),
        PROGRAM,
        PROGRAM.init_params(0),
        evaluations=1,
        on_outcome=note,
    )
    return account(tape)


def _is_a_whole(found: Account) -> None:
    """Merged intervals and gaps tile every shard, for each fragment."""
    by_place: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i in found.merged:
        by_place.setdefault((i.shard, i.fragment), []).append((i.start, i.stop))
    for gap in found.gaps:
        by_place.setdefault((gap.shard, gap.fragment), []).append((gap.start, gap.stop))
    for place, spans in by_place.items():
        at = 0
        for start, stop in sorted(spans):
            assert start == at, f"{place}: {sorted(spans)}"
            at = stop


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    drawn=DEATHS_AND_CUTS,
    every=st.sampled_from([1, 3, 10]),
    upload=st.sampled_from([0.1, 2.5]),
    adoption=st.sampled_from(["overwrite", "alpha", "rebase"]),
    late=st.sampled_from(["join", "drop"]),
)
def test_no_batch_counts_twice_whoever_dies_and_returns_however(
    drawn: list[tuple[int, str, str, float, float]],
    every: int,
    upload: float,
    adoption: str,
    late: str,
) -> None:
    befalls = _befalls(drawn)
    link = {"upload_steps": upload, "download_steps": 0.1, "latency_s": 0.2}
    world = {"befalls": befalls, "checkpoint_steps": every, "link": link}
    found = _account(world, adoption={"mode": adoption}, late=late, staleness_bound=1)
    assert found.merged
    assert not found.overlaps
    assert not found.miscounts
    _is_a_whole(found)
    died = {event["learner"] for event in befalls if event["kind"] == "death"}
    crashed = {gap.shard for gap in found.gaps if gap.reason is Reason.CRASH}
    assert len(crashed) <= len(died)
    assert all(gap.detail for gap in found.gaps if gap.reason is Reason.REFUSED)


def test_what_died_with_a_process_is_a_gap_and_a_checkpoint_makes_it_smaller() -> None:
    lost = {}
    for returns, every in (("fresh", 1), ("kept", 8), ("kept", 1)):
        death = {"learner": 0, "kind": "death", "at": {"s": 20.2}, "until": {"s": 20.4}}
        world = {"befalls": [death | {"returns": returns}], "checkpoint_steps": every}
        found = _account(world, sync_interval=24)
        crashed = [gap for gap in found.gaps if gap.reason is Reason.CRASH]
        lost[returns, every] = sum(gap.stop - gap.start for gap in crashed)
    assert lost["kept", 1] == 0
    assert 0 < lost["kept", 8] < lost["fresh", 1]
