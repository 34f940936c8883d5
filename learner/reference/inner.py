"""The inner optimizer: AdamW with a clipped gradient, its learning rate a function of progress.

The schedule holds no step counter: a learner that rejoins with a fresh optimizer state would start
the schedule anew and fall out of phase with the others. Progress comes in with every update.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32

from learner.reference.settings import ReferenceSettings

_TICKS = 1_000_000
"""optax counts whole steps; progress is handed to its schedules in millionths."""


def learning_rate(settings: ReferenceSettings) -> optax.Schedule:
    """Progress (f32 scalar in [0, 1]) to learning rate: linear warm-up, then half a cosine.

    Loshchilov and Hutter, "SGDR", arXiv 1608.03983, with a linear warm-up before it.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=max(1, round(settings.warmup_fraction * _TICKS)),
        decay_steps=_TICKS,
        end_value=settings.final_lr_fraction * settings.learning_rate,
    )
    return lambda progress: schedule(jnp.clip(progress, 0.0, 1.0) * float(_TICKS))


def build_inner(settings: ReferenceSettings) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101); `update` takes `progress` by keyword."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2),
        optax.add_decayed_weights(settings.weight_decay, mask=_is_matrix),
        _scale_by_progress(learning_rate(settings)),
    )


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def _scale_by_progress(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Updates times minus schedule(progress); stateless, which is the point."""

    def init(params: optax.Params) -> optax.EmptyState:
        return optax.EmptyState()

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        *,
        progress: Float32[Array, ""],
        **_: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        rate = schedule(progress)
        return jax.tree.map(lambda leaf: -rate * leaf, updates), state

    return optax.GradientTransformationExtraArgs(init, update)
