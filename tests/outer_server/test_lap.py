"""The closing lap takes the mean of what the learners hold."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fragments.payload import encode_int8
from fragments.quantize import dequantize, quantize, valid_counts
from fragments.records import ContributionKey, Version
from outer_server.core.state import ContributionMeta, MergeOrder, Participant
from outer_server.parameters import Parameters
from simulation.run import simulate
from simulation.world import World
from tests.support.tiny import TinyProgram, tiny_birth, tiny_spec


@pytest.mark.parametrize("merge", ["rda", "average"])
def test_a_closing_order_takes_the_mean_and_leaves_the_momentum_alone(merge: str) -> None:
    spec = tiny_spec(outer={"learning_rate": 0.5, "momentum": 0.8}, merge=merge)
    parameters = Parameters.newborn(spec, *tiny_birth(spec))
    layout = parameters.layout
    valid = valid_counts(layout.fragments[0], layout.rows_padded)
    mask = np.arange(layout.block)[None, :] < valid[:, None]
    participants, payloads, deltas = [], {}, []
    for seed, (learner, share) in enumerate([("a", 0.75), ("b", 0.25)]):
        noise = np.random.default_rng(seed).normal(size=mask.shape)
        value = np.where(mask, noise, 0.0).astype(np.float32)
        made = quantize(jnp.asarray(value), jnp.asarray(valid), 0.5)
        key = ContributionKey(learner, 0, Version(1, 0))
        payloads[key] = encode_int8(
            layout.fragments[0], np.asarray(made.codes), np.asarray(made.step_bits)
        )
        deltas.append(share * np.asarray(dequantize(made.codes, made.step_bits)))
        participants.append(Participant(learner, (ContributionMeta(key, 4, 64, 0, 4),), share))
    round_order = MergeOrder(0, 0, tuple(participants))
    parameters.apply(round_order, payloads, epoch=1)
    before = parameters.fragments[0]
    parameters.apply(replace(round_order, version=1, closing=True), payloads, epoch=1)
    after = parameters.fragments[0]
    expected = np.asarray(before.master_BxN) - sum(deltas)
    np.testing.assert_allclose(after.master_BxN, expected, atol=1e-6)
    for old, new in zip(jax.tree.leaves(before.outer), jax.tree.leaves(after.outer), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_lap_of_outer_steps_swings_on_where_the_mean_does_not() -> None:
    program, losses = TinyProgram(), {}
    for lap in ("mean", "step"):
        # The budget ends three steps after the last slot of a fragment.
        spec = tiny_spec(
            budget_tokens=4 * 51 * 16,
            sync_interval=12,
            closing_lap=lap,
            outer={"learning_rate": 0.5, "momentum": 0.8},
        )
        losses[lap] = simulate(spec, World(), program, program.init_params(0), evaluations=1).loss
    assert losses["mean"] < losses["step"]
