"""The single-learner baseline: the same program trained plainly, on one learner's share of tokens.

What decoupled learners reach together is only worth something if one of them alone, on the tokens
that it saw, does not reach it too.
"""

from __future__ import annotations

import jax.numpy as jnp

from learner.program import Program, Shard

_STEPS_IN_FLIGHT = 8
_WHOLE = Shard(0, 1)


def train_alone(program: Program, tokens: int, seed: int, shard: Shard = _WHOLE) -> float:
    """Held-out loss, in the program's unit, after training on `tokens` tokens, rounded up to steps.

    Starts from `init_params(seed)`, as the run did; progress, and with it the learning rate's
    schedule, runs from 0 to 1 over these tokens. Unpaced.

    Raises:
        ValueError: when `tokens` is not positive.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be positive, got {tokens}")
    steps = -(-tokens // program.tokens_per_step)
    params = program.init_params(seed)
    inner = program.init_inner(params)
    for cursor in range(steps):
        progress = jnp.float32(cursor / steps)
        params, inner, loss = program.step(params, inner, program.batch(shard, cursor), progress)
        if cursor % _STEPS_IN_FLIGHT == 0:
            loss.block_until_ready()  # bounds what is dispatched ahead, and so its memory
    return program.evaluate(params)
