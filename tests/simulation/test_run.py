from __future__ import annotations

from typing import Any

import pytest

from fragments.policies import policy_settings
from simulation.async_server import Paced
from simulation.baselines import alone
from simulation.clock import StalledError
from simulation.result import RunResult
from simulation.run import simulate
from simulation.world import World
from tests.support.tiny import TinyProgram, tiny_spec

TOKENS = 4 * 64 * TinyProgram.tokens_per_step
LINK = {"upload_steps": 0.3, "download_steps": 0.1, "latency_s": 0.02}


def _world(**settings: Any) -> World:
    return World.model_validate({"jitter": 0.05, "link": LINK} | settings)


# One program for all tests, so that its step is compiled once.
PROGRAM = TinyProgram(learning_rate=0.01)


def _run(world: World | None = None, applied: Paced | None = None, **spec: Any) -> RunResult:
    settings: dict[str, Any] = {
        "budget_tokens": TOKENS, "sync_interval": 8, "lease_ttl_s": 15.0, "closing_lap_s": 20.0,
    }  # fmt: skip
    return simulate(
        tiny_spec(**settings | spec),
        world or _world(),
        PROGRAM,
        PROGRAM.init_params(0),
        applied_alone=applied,
        evaluations=2,
    )


def _everybody_holds_the_same(result: RunResult) -> bool:
    return all(one.holds_final in (True, None) for one in result.learners)


def test_the_same_seed_gives_the_same_weights_and_another_does_not() -> None:
    first, again, other = _run(), _run(), _run(_world(seed=1))
    assert again == first
    assert other.digest != first.digest
    assert _everybody_holds_the_same(first)


def test_equal_learners_together_beat_one_on_its_share() -> None:
    by_itself = alone(PROGRAM, PROGRAM.init_params(0), _world(), TOKENS // 4, seed=0)
    together = _run()
    assert together.loss < 0.5 * by_itself.loss
    assert together.goodput == pytest.approx(1.0, abs=0.02)
    assert TOKENS <= together.tokens_trained <= TOKENS + 4 * TinyProgram.tokens_per_step


def test_with_equal_learners_and_instant_lines_it_is_synchronous_diloco_to_the_bit() -> None:
    instant = World()
    free = _run(instant, fragments=1, merge="average")
    diloco = policy_settings("diloco", max_learners=4)
    waiting = _run(instant, **diloco)
    # Who waits is not moved by jitter or slow lines, only delayed.
    delayed = _run(**diloco)
    assert free.digest == waiting.digest == delayed.digest
    assert free.virtual_s == waiting.virtual_s < delayed.virtual_s


def test_a_slow_learner_slows_nobody_unless_all_must_answer() -> None:
    world = _world(speeds=(1.0, 1.0, 0.8, 0.25))
    free = _run(world)
    bound = _run(world, quorum=4, fragments=1, adoption={"max_overlap_steps": 0})
    assert free.goodput == pytest.approx(1.0, abs=0.02)
    # All at the pace of the slowest: 4 * .25 of 3.05.
    assert bound.goodput == pytest.approx(4 * 0.25 / 3.05, rel=0.05)
    steps = [one.steps for one in bound.learners]
    assert max(steps) - min(steps) <= 8
    assert _everybody_holds_the_same(free)
    assert _everybody_holds_the_same(bound)


def test_a_slower_line_delivers_later_and_late_where_nobody_waits() -> None:
    slow_line = {3: LINK | {"upload_steps": 3.0}}
    first = {"rule": "paper", "gamma": 0.0}
    hasty = _run(_world(links=slow_line), closing=first)
    patient = _run(_world(links=slow_line))
    assert hasty.learners[3].contributions_late > 5
    assert hasty.learners[3].contributions_late > hasty.learners[0].contributions_late
    assert patient.learners[3].contributions_late == 0
    assert patient.learners[3].contributions_merged == patient.rounds_merged


def test_the_last_progress_of_learners_on_slow_lines_is_merged() -> None:
    # In the closing lap every fragment is asked for at once, and the answers queue up.
    result = _run(_world(link=LINK | {"upload_steps": 2.0}), fragments=2)
    assert [one.contributions_late for one in result.learners] == [0, 0, 0, 0]
    assert len({one.contributions_merged for one in result.learners}) == 1


@pytest.mark.parametrize("returns", ["fresh", "moments", "kept"])
def test_a_dead_learner_returns_and_contributes_again(returns: str) -> None:
    death = {
        "learner": 3, "kind": "death", "at": {"share": 0.25}, "until": {"share": 0.5},
        "returns": returns,
    }  # fmt: skip
    result = _run(_world(befalls=(death,)))
    gone = result.learners[3]
    assert gone.deaths == 1
    assert 0 < gone.contributions_merged < result.learners[0].contributions_merged
    assert result.goodput == pytest.approx(1 - 0.25 / 4 / (1 - 0.25 / 4), abs=0.05)
    # What its processes trained counts once, whatever of it the last one goes on with; the step
    # whose report died with the first process does not count at all.
    steps = sum(one.steps for one in result.learners)
    assert steps - 1 <= result.tokens_trained / TinyProgram.tokens_per_step <= steps
    assert _everybody_holds_the_same(result)


def test_a_learner_that_died_for_good_stops_nobody_even_if_all_must_answer() -> None:
    death = {"learner": 0, "kind": "death", "at": {"step": 12}}
    result = _run(_world(befalls=(death,)), quorum=4)
    assert result.learners[0].holds_final is None
    assert result.learners[1].contributions_merged > 10


def test_a_learner_back_from_a_partition_is_level_with_the_others() -> None:
    partition = {"learner": 3, "kind": "partition", "at": {"step": 10}, "until": {"step": 40}}
    result = _run(_world(befalls=(partition,)))
    assert 15 < result.learners[3].steps_lost <= 30 + 8
    assert result.learners[3].contributions_merged < result.learners[0].contributions_merged
    assert _everybody_holds_the_same(result)


def test_a_newcomer_enters_at_the_next_opening() -> None:
    world = _world(befalls=({"learner": 3, "kind": "join", "at": {"share": 0.5}},))
    result = _run(world)
    assert 0 < result.learners[3].contributions_merged < result.learners[0].contributions_merged
    assert result.goodput == pytest.approx(1.0, abs=0.02)


def test_a_stall_costs_its_steps_and_nothing_else() -> None:
    world = _world(befalls=({"learner": 3, "kind": "stall", "at": {"s": 10}, "until": {"s": 30}},))
    result = _run(world)
    assert result.learners[0].steps - result.learners[3].steps == pytest.approx(20, abs=4)


def test_pushes_applied_alone_move_the_weights_too_far() -> None:
    outer = {"learning_rate": 0.5, "momentum": 0.9}
    rounds, naive = _run(outer=outer), _run(applied="learner", outer=outer)
    delayed = _run(
        applied="learner",
        outer={
            "learning_rate": 0.5,
            "factory": "simulation.async_policies:delayed_nesterov",
            "settings": {"momentum": 0.9, "every": 4},
        },
    )
    fractional = _run(
        applied="server",
        outer={
            "learning_rate": 0.5,
            "factory": "simulation.async_policies:fractional_momentum",
            "settings": {"momentum": 0.9},
        },
    )
    assert naive.loss > 4 * rounds.loss
    assert delayed.loss < naive.loss
    assert fractional.loss < naive.loss
    for result in (naive, delayed, fractional):
        assert result.rounds_merged == sum(one.contributions_merged for one in result.learners)


def test_late_contributions_may_be_taken_against_the_current_value() -> None:
    slow = _world(links={3: LINK | {"upload_steps": 6.0}})
    first = {"rule": "paper", "gamma": 0.0}
    against = {
        rule: simulate(
            tiny_spec(budget_tokens=TOKENS, sync_interval=8, closing=first),
            slow, PROGRAM, PROGRAM.init_params(0), late_against=rule, evaluations=1,
        )
        for rule in ("base", "current")
    }  # fmt: skip
    assert all(one.learners[3].contributions_late > 5 for one in against.values())
    assert against["base"].digest != against["current"].digest
    assert all(_everybody_holds_the_same(one) for one in against.values())


def test_a_run_that_nobody_can_finish_is_given_up() -> None:
    gone = tuple({"learner": i, "kind": "death", "at": {"step": 12}} for i in range(4))
    with pytest.raises(StalledError, match="tokens trained"):
        _run(_world(befalls=gone))
