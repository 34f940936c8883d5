"""The inner optimizer: AdamW by hand, and a rate that follows progress and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.reference.inner import build_inner, learning_rate
from learner.reference.settings import ReferenceSettings

SETTINGS = ReferenceSettings(
    learning_rate=0.01,
    warmup_fraction=0.2,
    final_lr_fraction=0.1,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    clip_norm=1.0,
)
RATE = learning_rate(SETTINGS)


@pytest.mark.parametrize(
    ("progress", "rate"),
    [(0.0, 0.0), (0.1, 0.005), (0.2, 0.01), (0.6, 0.0055), (1.0, 0.001), (1.5, 0.001), (-1, 0)],
)
def test_warm_up_then_cosine(progress: float, rate: float) -> None:
    assert float(RATE(jnp.float32(progress))) == pytest.approx(rate, rel=1e-3, abs=1e-9)


@given(st.floats(0, 1, width=32), st.floats(0, 1, width=32))
def test_rises_then_falls(a: float, b: float) -> None:
    low, high = sorted((a, b))
    rates = float(RATE(jnp.float32(low))), float(RATE(jnp.float32(high)))
    if high <= SETTINGS.warmup_fraction:
        assert rates[0] <= rates[1] + 1e-9
    elif low >= SETTINGS.warmup_fraction:
        assert rates[1] <= rates[0] + 1e-9


def test_three_steps_equal_adamw_by_hand() -> None:
    inner = build_inner(SETTINGS)
    rng = np.random.default_rng(0)
    by_hand = {"matrix": rng.normal(size=(3, 2)), "vector": rng.normal(size=4)}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in by_hand.items()}
    state = inner.init(params)
    update = jax.jit(inner.update)
    first = {name: np.zeros_like(value) for name, value in by_hand.items()}
    second = {name: np.zeros_like(value) for name, value in by_hand.items()}
    for count, (progress, size) in enumerate([(0.1, 0.01), (0.2, 5.0), (0.9, 1.0)], start=1):
        gradient = {name: size * rng.normal(size=v.shape) for name, v in by_hand.items()}
        with jax.numpy_dtype_promotion("standard"):
            updates, state = update(
                {name: jnp.asarray(value, jnp.float32) for name, value in gradient.items()},
                state,
                params,
                progress=jnp.float32(progress),
            )
        params = {name: params[name] + updates[name] for name in params}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        for name, value in by_hand.items():
            g = gradient[name] * min(1.0, SETTINGS.clip_norm / norm)
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            direction = first[name] / (1 - 0.9**count)
            direction /= np.sqrt(second[name] / (1 - 0.95**count)) + 1e-8
            decay = SETTINGS.weight_decay * value if value.ndim >= 2 else 0.0
            by_hand[name] = value - float(RATE(jnp.float32(progress))) * (direction + decay)
        for name, value in by_hand.items():
            np.testing.assert_allclose(params[name], value, rtol=1e-4, atol=1e-6)


def test_a_learner_that_rejoins_with_a_fresh_state_does_not_start_the_schedule_anew() -> None:
    """Adam's first update is the rate times the gradient's sign: late in a run, the late rate."""
    inner = build_inner(SETTINGS.model_copy(update={"weight_decay": 0.0}))
    params = {"vector": jnp.zeros(4, jnp.float32)}
    gradient = {"vector": jnp.asarray([0.1, -0.1, 0.1, -0.1], jnp.float32)}
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = inner.update(gradient, inner.init(params), params, progress=jnp.float32(0.6))
    expected = -0.0055 * np.sign(np.asarray(gradient["vector"]))
    np.testing.assert_allclose(updates["vector"], expected, rtol=1e-3)
