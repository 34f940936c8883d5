from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fragments.errors import SettingsError
from learner.program import Shard
from simulation.baselines import alone, data_parallel, tree_digest
from simulation.world import World
from tests.support.tiny import TinyProgram


def test_data_parallel_is_the_mean_of_the_learners_gradients_at_every_step() -> None:
    program = TinyProgram()
    params = program.init_params(0)
    result = data_parallel(program, params, World(speeds=(1, 1, 1)), 5 * 3 * 16, seed=0)
    by_hand, inner = params, program.init_inner(params)
    for cursor in range(5):
        stepped = [
            program.step(by_hand, inner, program.batch(Shard(m, 3), cursor), jnp.float32(0)).params
            for m in range(3)
        ]
        # With plain SGD, the mean of the stepped copies is the step of the mean gradient.
        by_hand = jax.tree.map(lambda *p: sum(p) / jnp.float32(3), *stepped)
    assert result.tokens_trained == 5 * 3 * 16
    assert result.loss == pytest.approx(program.evaluate(by_hand), rel=1e-4)
    assert result.bits_up == pytest.approx(32 * 2 * 2 / 3)


def test_a_step_takes_as_long_as_the_slowest_learners_and_the_all_reduce() -> None:
    program = TinyProgram()
    world = World.model_validate({"speeds": [1, 0.25], "link": {"up_mbit_s": 36e-6}})
    result = data_parallel(program, program.init_params(0), world, 10 * 2 * 16, seed=0)
    # 9 parameters: 2 * 1/2 * 36 bytes = 288 bits at 36 bit/s are 8 s; the slow one's step is 4 s.
    assert result.virtual_s == pytest.approx(10 * 12.0)


def test_alone_trains_on_its_own_shard_only() -> None:
    program = TinyProgram()
    params = program.init_params(0)
    result = alone(program, params, World(), 7 * 16, seed=0)
    by_hand, inner = params, program.init_inner(params)
    for cursor in range(7):
        batch = program.batch(Shard(0, 4), cursor)
        by_hand, inner, _ = program.step(by_hand, inner, batch, jnp.float32(0))
    assert result.digest == tree_digest(by_hand)
    assert np.isclose(result.loss, program.evaluate(by_hand))


def test_a_baseline_refuses_a_world_in_which_something_befalls_somebody() -> None:
    program = TinyProgram()
    event = {"learner": 0, "kind": "death", "at": {"step": 1}}
    with pytest.raises(SettingsError, match="no failures"):
        alone(program, program.init_params(0), World.model_validate({"befalls": [event]}), 16, 0)
