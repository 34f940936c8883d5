"""The outer step on one fragment, and the update that goes out. B rows, N values a row."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array, Bool, Float32, Int32, UInt16

from fragments.advance import advance
from fragments.codec import Codec
from fragments.errors import SettingsError
from fragments.memory import computed, is_in_memory, on_device
from fragments.quantize import Quantized, Symbols
from fragments.runspec import OuterSettings
from outer_server.core.momentum import move


class FragmentParameters(NamedTuple):
    """The server's own values of one fragment.

    `master_BxN`: float32 (B, N), the exact parameters. `broadcast_BxN`: float32 (B, N), what
    learners hold, equal to the bit everywhere; what quantization left out of it is in the master
    only and goes out with the next version. `outer`: the optax state of this fragment.
    """

    master_BxN: Float32[Array, "B N"]
    broadcast_BxN: Float32[Array, "B N"]
    outer: Any


class Stepped(NamedTuple):
    """What an outer step makes. `digest`: of the broadcast copy, 16 hex digits. `finite` False:
    nothing of it may be used.
    """

    parameters: FragmentParameters
    codes_BxN: Symbols
    step_bits_B: UInt16[Array, " B"]
    digest: str
    finite: Bool[Array, ""]


OuterStep = Callable[
    [FragmentParameters, Float32[np.ndarray, "B N"], Int32[Array, " B"]],
    Stepped,
]
"""From the old values and the merged pseudo-gradient, whose memory is used up: where the tensors
are in this machine's memory, it holds what the broadcast copy was behind the master when the step
is done.
"""


def outer_optimizer(settings: OuterSettings) -> optax.GradientTransformation:
    """SGD on the merged pseudo-gradient D, with momentum: b <- mu*b + D, and
    theta <- theta - eta*(D + mu*b) with Nesterov, theta - eta*b without (DiLoCo,
    arXiv 2311.08105, section 2). Momentum 0 has no buffer.

    Or the transformation that `settings.factory` names; SettingsError where it
    does not exist or does not take the settings given.
    """
    if not settings.factory:
        return optax.sgd(
            settings.learning_rate,
            momentum=settings.momentum or None,
            nesterov=settings.nesterov and settings.momentum > 0,
        )
    module, _, name = settings.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
        made = factory(settings.learning_rate, **settings.settings)
    except (ImportError, AttributeError, TypeError) as error:
        raise SettingsError(f"outer optimizer {settings.factory!r}: {error}") from error
    if not isinstance(made, optax.GradientTransformation):
        raise SettingsError(f"outer optimizer {settings.factory!r} is no optax transformation")
    return made


def newborn(
    optimizer: optax.GradientTransformation, value_BxN: Float32[Array, "B N"]
) -> FragmentParameters:
    """Version 0 of a fragment: the same value in the master and broadcast copies."""
    return FragmentParameters(value_BxN, value_BxN, optimizer.init(value_BxN))


def make_outer_step(settings: OuterSettings, codec: Codec, step_fraction: float) -> OuterStep:
    """The outer step, compiled once, since all fragments share one shape.

    The update sent is master - broadcast copy after the step, reduced by `codec`
    with `step_fraction`; the new broadcast copy is the old one plus exactly that. The old values
    stay as they are. The same settings give the same function, which many runs in one process (the
    study, the tests) compile once. SettingsError as `outer_optimizer`.
    """
    optimize = _optimize(settings.model_dump_json())
    is_sgd = not settings.factory and settings.momentum > 0

    def step(
        old: FragmentParameters,
        merged_BxN: Float32[np.ndarray, "B N"],
        valid_B: Int32[Array, " B"],
    ) -> Stepped:
        if is_sgd and is_in_memory(old.master_BxN) and is_in_memory(old.broadcast_BxN):
            trace, *rest = old.outer
            moved = move(old.master_BxN, trace.trace, old.broadcast_BxN, merged_BxN, settings)
            outer = (trace._replace(trace=moved.momentum_BxN), *rest)
            reduced = codec.reduce(on_device(merged_BxN), valid_B, step_fraction)
            return _sent(old, moved.master_BxN, outer, reduced)
        made = optimize(old.master_BxN, old.outer, on_device(merged_BxN))
        master_BxN, outer = computed(made)
        reduced = codec.difference(
            master_BxN, old.broadcast_BxN, valid_B, step_fraction, merged_BxN
        )
        return _sent(old, master_BxN, outer, reduced)

    return step


def make_closing_step(codec: Codec, step_fraction: float) -> OuterStep:
    """The step of the closing lap: theta <- theta - D, with the outer state left alone.

    D is the average with the weights of any merge. From contributions on the current version theta
    becomes the weighted mean of what their senders held, within what quantization leaves out. An
    ordinary step would add a whole round's momentum to the few steps that a fragment has made since
    its last round (docs/study.md has what that costs, `closing_lap_step`).
    """

    def step(
        old: FragmentParameters,
        merged_BxN: Float32[np.ndarray, "B N"],
        valid_B: Int32[Array, " B"],
    ) -> Stepped:
        master_BxN = computed(_minus(old.master_BxN, on_device(merged_BxN)))
        reduced = codec.difference(
            master_BxN, old.broadcast_BxN, valid_B, step_fraction, merged_BxN
        )
        return _sent(old, master_BxN, old.outer, reduced)

    return step


_Optimize = Callable[
    [Float32[Array, "B N"], Any, Float32[Array, "B N"]], tuple[Float32[Array, "B N"], Any]
]


@lru_cache(maxsize=16)
def _optimize(settings_json: str) -> _Optimize:
    """(master, outer state, merged pseudo-gradient) to the next master and outer state."""
    optimizer = outer_optimizer(OuterSettings.model_validate_json(settings_json))

    # Nothing is donated: until it is known that what comes out is finite the old values are needed.
    @jax.jit
    def optimize(
        master_BxN: Float32[Array, "B N"], outer: Any, merged_BxN: Float32[Array, "B N"]
    ) -> tuple[Float32[Array, "B N"], Any]:
        updates_BxN, outer = optimizer.update(merged_BxN, outer, master_BxN)
        return optax.apply_updates(master_BxN, updates_BxN), outer

    return optimize


def _sent(
    old: FragmentParameters,
    master_BxN: Float32[Array, "B N"],
    outer: Any,
    reduced: Quantized,
) -> Stepped:
    """The new master, and the update that takes the broadcast copy towards it."""
    broadcast_BxN, digest = advance(old.broadcast_BxN, reduced.codes, reduced.step_bits)
    new = FragmentParameters(master_BxN, broadcast_BxN, outer)
    # The broadcast copy is finite, so a master that is not shows in the difference.
    return Stepped(new, reduced.codes, reduced.step_bits, digest, reduced.finite)


@jax.jit
def _minus(one_BxN: Float32[Array, "B N"], two_BxN: Float32[Array, "B N"]) -> Array:
    return one_BxN - two_BxN
