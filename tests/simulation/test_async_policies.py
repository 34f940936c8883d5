from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax

from simulation.async_policies import FractionalState, delayed_nesterov, fractional_momentum

ARRIVALS = [np.array([[1.0, -2.0]]), np.array([[0.5, 0.5]]), np.array([[-1.0, 3.0]]),
            np.array([[2.0, 1.0]]), np.array([[0.25, -1.0]])]  # fmt: skip


def _apply(optimizer: optax.GradientTransformation, arrivals: list[np.ndarray]) -> np.ndarray:
    theta = jnp.zeros((1, 2), jnp.float32)
    state = optimizer.init(theta)
    for g in arrivals:
        change, state = optimizer.update(jnp.asarray(g, jnp.float32), state, theta)
        theta = theta + change
    return np.asarray(theta)


def test_delayed_nesterov_is_the_written_out_recurrence() -> None:
    eps, beta, n, c = 0.5, 0.8, 2, 0.1
    theta, m, total = np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 2))
    for arrival, g in enumerate(ARRIVALS, start=1):
        total = total + g
        if arrival % n == 0:
            m = beta * m + total / n
            theta = theta - eps * ((1 - c * n + c) * beta * m + g / n)
            total = np.zeros((1, 2))
        else:
            theta = theta - eps * (c * beta * m + g / n)
    got = _apply(delayed_nesterov(eps, momentum=beta, every=n, c=c), ARRIVALS)
    np.testing.assert_allclose(got, theta, rtol=1e-6)


def test_delayed_nesterov_without_delay_is_nesterov() -> None:
    delayed = _apply(delayed_nesterov(0.5, momentum=0.8, every=1), ARRIVALS)
    nesterov = _apply(optax.sgd(0.5, momentum=0.8, nesterov=True), ARRIVALS)
    np.testing.assert_allclose(delayed, nesterov, rtol=1e-6)


def test_fractional_momentum_by_hand() -> None:
    # eta .5, mu .8, two arrivals of g = 1 that are half a round each:
    # b = .5,                 theta = -.5*.5*(1 + .8*.5)              = -.35
    # b = .5*sqrt(.8) + .5,   theta = -.35 - .25*(1 + .8*.9472136)    = -.7894427
    optimizer = fractional_momentum(0.5, momentum=0.8)
    theta = jnp.zeros((1, 1), jnp.float32)
    state = optimizer.init(theta)
    for _ in range(2):
        assert isinstance(state, FractionalState)
        state = state._replace(share=jnp.float32(0.5))
        change, state = optimizer.update(jnp.ones((1, 1), jnp.float32), state, theta)
        theta = theta + change
    np.testing.assert_allclose(np.asarray(theta), [[-0.7894427]], rtol=1e-6)


def test_fractional_momentum_of_whole_rounds_is_nesterov() -> None:
    fractional = _apply(fractional_momentum(0.5, momentum=0.8), ARRIVALS)
    nesterov = _apply(optax.sgd(0.5, momentum=0.8, nesterov=True), ARRIVALS)
    np.testing.assert_allclose(fractional, nesterov, rtol=1e-6)
