"""Merge, outer step and broadcast copy against a few lines of numpy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fragments.digest import digest_hex
from fragments.errors import NonFiniteError
from fragments.payload import Payload, decode_f32, decode_int8, encode_int8
from fragments.quantize import apply_update, dequantize, quantize, valid_counts
from fragments.records import ContributionKey, Version
from fragments.runspec import OuterSettings, RunSpec
from outer_server.core.state import ContributionMeta, MergeOrder
from outer_server.core.weights import merge_order
from outer_server.parameters import Parameters
from tests.support.tiny import tiny_birth, tiny_spec


def _newborn(spec: RunSpec) -> Parameters:
    return Parameters.newborn(spec, *tiny_birth(spec))


def _contribution(
    parameters: Parameters, learner: str, seed: int, tokens: int
) -> tuple[ContributionMeta, Payload, np.ndarray]:
    """A random encoded pseudo-gradient of fragment 0, and its exact decoded value."""
    layout = parameters.layout
    valid = valid_counts(layout.fragments[0], layout.rows_padded)
    noise = np.random.default_rng(seed).normal(size=(layout.rows_padded, layout.block))
    mask = np.arange(layout.block)[None, :] < valid[:, None]
    value = np.where(mask, noise, 0.0).astype(np.float32)
    quantized = quantize(jnp.asarray(value), jnp.asarray(valid), 0.5)
    codes, bits = np.asarray(quantized.codes), np.asarray(quantized.step_bits)
    key = ContributionKey(learner, 0, Version(1, 0))
    payload = encode_int8(layout.fragments[0], codes, bits)
    exact = np.asarray(dequantize(quantized.codes, quantized.step_bits))
    return ContributionMeta(key, 4, tokens, 0, 4), payload, exact


def _apply(
    parameters: Parameters, parts: list[tuple[ContributionMeta, Payload, np.ndarray]], version: int
) -> tuple[MergeOrder, np.ndarray]:
    order = merge_order(0, version, [meta for meta, _, _ in parts], weight_bound=100.0)
    payloads = {meta.key: payload for meta, payload, _ in parts}
    update, _ = parameters.apply(order, payloads, epoch=1)
    codes, bits = decode_int8(
        parameters.layout.fragments[0], parameters.layout.rows_padded, update.payload
    )
    return order, np.asarray(dequantize(jnp.asarray(codes), jnp.asarray(bits)))


def test_the_nesterov_outer_step_follows_the_written_out_recurrence() -> None:
    """b <- mu b + D; theta <- theta - eta (D + mu b), over five rounds of two learners."""
    parameters = _newborn(tiny_spec(outer={"learning_rate": 0.5, "momentum": 0.8}, merge="average"))
    theta = np.asarray(parameters.fragments[0].master_BxN).astype(np.float64)
    buffer = np.zeros_like(theta)
    for version in range(5):
        parts = [
            _contribution(parameters, "a", 2 * version, tokens=30),
            _contribution(parameters, "b", 2 * version + 1, tokens=10),
        ]
        # Weights 30*30/4 and 10*10/4: shares 0.9 and 0.1.
        merged = 0.9 * parts[0][2].astype(np.float64) + 0.1 * parts[1][2]
        buffer = 0.8 * buffer + merged
        theta = theta - 0.5 * (merged + 0.8 * buffer)
        _apply(parameters, parts, version)
        np.testing.assert_allclose(parameters.fragments[0].master_BxN, theta, atol=2e-6)


def test_plain_sgd_has_no_buffer_and_moves_by_the_average() -> None:
    plain = {"learning_rate": 1.0, "momentum": 0.0}
    parameters = _newborn(tiny_spec(outer=plain, merge="average"))
    before = np.asarray(parameters.fragments[0].master_BxN)
    parts = [_contribution(parameters, "a", 0, 10), _contribution(parameters, "b", 1, 10)]
    _apply(parameters, parts, 0)
    expected = before - (0.5 * parts[0][2] + 0.5 * parts[1][2])
    np.testing.assert_allclose(parameters.fragments[0].master_BxN, expected, atol=1e-6)


def keeping(learning_rate: float) -> optax.GradientTransformation:
    """An outer optimizer whose state is the last pseudo-gradient itself."""

    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del state, params
        return -learning_rate * gradient, gradient

    return optax.GradientTransformation(jnp.zeros_like, update)


def test_an_optimizer_may_keep_the_pseudo_gradient_it_was_given() -> None:
    """Its memory is used again within the step."""
    outer = {"learning_rate": 0.5, "factory": f"{__name__}:keeping"}
    parameters = _newborn(tiny_spec(outer=outer, merge="average"))
    for version in range(3):
        part = _contribution(parameters, "a", version, 10)
        _apply(parameters, [part], version)
        kept = np.asarray(parameters.fragments[0].outer)
        np.testing.assert_allclose(kept, part[2], atol=1e-6)


def test_the_sign_is_base_minus_local() -> None:
    """One learner, rate 1, no momentum: the server lands on the learner's local weights."""
    parameters = _newborn(tiny_spec(outer={"learning_rate": 1.0, "momentum": 0.0}))
    base = np.asarray(parameters.fragments[0].master_BxN)
    part = _contribution(parameters, "a", 3, 10)
    _apply(parameters, [part], 0)
    local = base - part[2]
    np.testing.assert_allclose(parameters.fragments[0].master_BxN, local, atol=1e-6)


def test_what_quantization_leaves_out_goes_out_with_the_next_version() -> None:
    parameters = _newborn(tiny_spec())
    learner_copy = parameters.fragments[0].broadcast_BxN
    for version in range(4):
        part = _contribution(parameters, "a", version, 10)
        order = merge_order(0, version, [part[0]], 2.0)
        update, new = parameters.apply(order, {part[0].key: part[1]}, epoch=1)
        codes, bits = decode_int8(
            parameters.layout.fragments[0], parameters.layout.rows_padded, update.payload
        )
        learner_copy = apply_update(learner_copy, jnp.asarray(codes), jnp.asarray(bits))
        # A learner that only ever adds updates holds the server's broadcast copy to the bit.
        assert digest_hex(learner_copy) == update.digest == digest_hex(new.broadcast_BxN)
        residual = np.abs(np.asarray(new.master_BxN) - np.asarray(new.broadcast_BxN))
        step = np.asarray(dequantize(jnp.ones_like(jnp.asarray(codes)), jnp.asarray(bits)))
        assert (residual <= 0.5 * step + 1e-7).all()


def test_the_full_value_is_the_broadcast_copy_to_the_bit() -> None:
    parameters = _newborn(tiny_spec())
    _apply(parameters, [_contribution(parameters, "a", 0, 10)], 0)
    layout, broadcast = parameters.layout, parameters.fragments[0].broadcast_BxN
    decoded = decode_f32(layout.fragments[0], layout.rows_padded, parameters.full(0, broadcast))
    assert decoded.tobytes() == np.asarray(broadcast).tobytes()


def test_a_step_that_overflows_changes_nothing() -> None:
    parameters = _newborn(tiny_spec())
    settings = OuterSettings(learning_rate=3e38, momentum=0.0)
    parameters = Parameters(
        parameters.spec.model_copy(update={"outer": settings}),
        parameters.layout,
        parameters.fragments,
    )
    before = parameters.fragments
    with pytest.raises(NonFiniteError, match="fragment 0 from version 0"):
        _apply(parameters, [_contribution(parameters, "a", 0, 10)], 0)
    assert parameters.fragments is before


def test_initial_weights_that_are_not_finite_are_refused() -> None:
    spec = tiny_spec()
    layout, values = tiny_birth(spec)
    values[1] = np.full_like(values[1], np.nan)
    with pytest.raises(NonFiniteError, match="fragment 1"):
        Parameters.newborn(spec, layout, values)
