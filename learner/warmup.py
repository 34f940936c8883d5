"""The first steps of a learner that begins or returns in mid-run, shortened.

Its inner moments know nothing yet, or are those of other weights, and its steps go astray. At the
birth of a run the learning rate's own warm-up takes care of that; in mid-run that rate follows what
all have trained, and is at its full height. (`docs/study.md`, "Learners that die and return")
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from learner.program import Params


class InnerWarmup:
    """Scales what a step changes. For one thread.

    Args:
        steps: so many steps after `begin` are shortened, the n-th of them to n / (steps + 1) of
            what the program made of it. 0: none is.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._made = steps

    def warm_up(self, params: Params) -> None:
        """Compile what `apply` runs, before training begins. Holds one tensor more at a time."""
        if self._steps > 0:
            for leaf in jax.tree.leaves(params):
                _between(leaf, leaf, jnp.float32(1)).block_until_ready()

    def begin(self) -> None:
        """The inner moments do not suit the weights from here on."""
        self._made = 0

    def apply(self, before: Params, after: Params) -> Params:
        """The parameters that a step from `before` leads to, of which the program says `after`."""
        if self._made >= self._steps:
            return after
        self._made += 1
        share = jnp.float32(self._made / (self._steps + 1))
        return jax.tree.map(lambda old, new: _between(old, new, share), before, after)


@jax.jit
def _between(old: Array, new: Array, share: Float32[Array, ""]) -> Array:
    wide = old.astype(jnp.float32)
    return (wide + share * (new.astype(jnp.float32) - wide)).astype(old.dtype)
