"""The outer step in one pass over memory has the bits of the optimizer that it stands for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# In a process of its own, with the server's arithmetic: this one's jax may fuse multiply-add.
COMPARE = """
import os, sys
from harness.environment import use_server_arithmetic
use_server_arithmetic(os.environ)
import jax, jax.numpy as jnp, numpy as np
from fragments.runspec import OuterSettings
from outer_server.core.momentum import move
from outer_server.core.step import _optimize, newborn, outer_optimizer

mu, is_nesterov = float(sys.argv[1]), sys.argv[2] == "True"
settings = OuterSettings(learning_rate=0.7, momentum=mu, nesterov=is_nesterov)
draw = np.random.default_rng(3)
shape = (40, 33)

def values():
    size = 10.0 ** draw.uniform(-46, 3, shape)
    found = (draw.choice([-1.0, 1.0], shape) * size).astype(np.float32)
    found[draw.random(shape) < 0.05] = 0.0
    found[draw.random(shape) < 0.05] *= np.float32(0)
    return found

old = newborn(outer_optimizer(settings), jnp.asarray(values()))
trace, *rest = old.outer
state = (trace._replace(trace=jnp.asarray(values())), *rest)
master, broadcast = old.master_BxN, jnp.asarray(values())
many = 0
for _ in range(50):
    merged = values()
    expected, outer = _optimize(settings.model_dump_json())(master, state, jnp.asarray(merged))
    moved = move(master, state[0].trace, broadcast, merged, settings)
    bits = [np.asarray(each).view(np.uint32) for each in (
        expected, moved.master_BxN, outer[0].trace, moved.momentum_BxN)]
    np.testing.assert_array_equal(bits[0], bits[1])
    np.testing.assert_array_equal(bits[2], bits[3])
    np.testing.assert_array_equal(merged, np.asarray(expected) - np.asarray(broadcast))
    state, master = outer, expected
    many += int((np.asarray(outer[0].trace) == 0).sum())
assert many > 0, "some came to be too small"
bad = values()
bad[0, 0], bad[1, 1] = np.nan, np.inf
moved = move(master, state[0].trace, broadcast, bad, settings)
assert np.isnan(bad[0, 0]) and np.isinf(bad[1, 1]), "what is not finite is seen in the difference"
"""


@pytest.mark.parametrize("momentum", [0.8, 0.9])
@pytest.mark.parametrize("is_nesterov", [True, False])
def test_bits_are_those_of_optax(momentum: float, is_nesterov: bool) -> None:
    argv = [sys.executable, "-c", COMPARE, str(momentum), str(is_nesterov)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
