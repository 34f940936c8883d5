"""The API by which any JAX model trains here: a pytree of parameters and a jitted step.

The learner's loop knows nothing of layers, tokenizers or optimizers. It calls a `Program`, and what
it hands around (`Params`, `Inner`, `Batch`) it treats as opaque pytrees. `learner.reference` is one
implementation; `tests/learner/test_reference_program.py` shows what an implementation must hold to.

A run names a factory, "module:function" (`program.factory`), that every process calls:

    build(settings: dict[str, Any], data: str | None, seed: int) -> Program

`settings` are the run's `program.settings`, `data` is what --data said (None: the program's own
corpus), and `seed` is the run's. It raises `fragments.errors.SettingsError` or `DataError` for what
a person can mend. A program may have `data_digest: str`, a digest of all of its data: a process
whose digest differs from the one at the run's birth is then refused unless told otherwise.

Importing this module does not import jax, so that command-line help and status stay fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import jax

Params: TypeAlias = Any
"""Pytree of device arrays, every leaf floating point: what is fragmented, merged and evaluated."""

Inner: TypeAlias = Any
"""Pytree of device arrays: the inner optimizer's state. It never leaves the learner's side."""

Batch: TypeAlias = Any
"""Pytree of numpy arrays: what one inner step trains on."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the training data a learner owns: part `index` of `count` disjoint ones.

    Raises:
        ValueError: unless 0 <= index < count.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"data shard {self.index} of {self.count}: need 0 <= index < count")


class StepResult(NamedTuple):
    """What one inner step returns, all of it still on the device."""

    params: Params
    inner: Inner
    loss: jax.Array
    """f32 scalar, nats per token, mean over the batch; fetching it is the caller's decision."""


@runtime_checkable
class Program(Protocol):
    """A model, its data and its inner optimizer, as the learner sees them.

    Every method but `evaluate` is pure: equal arguments give equal bits on the same machine.
    """

    @property
    def identity(self) -> str:
        """Model and tokenizer, in words; part of the layout digest that learners must share."""
        ...

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one call of `step` trains on."""
        ...

    @property
    def loss_unit(self) -> str:
        """Unit of `evaluate`'s answer, such as "bits per byte"."""
        ...

    def init_params(self, seed: int) -> Params:
        """Fresh parameters; a pytree whose leaves are all floating point. Pure in `seed`."""
        ...

    def init_inner(self, params: Params) -> Inner:
        """Fresh inner optimizer state for `params`; any pytree."""
        ...

    def averaged(self, path: str) -> bool:
        """Is the tensor at `path` merged by token-weighted average instead of RDA?

        True for embeddings, whose rows are touched by few tokens and so have no common direction.
        `path` is the leaf's path as `jax.tree_util.keystr` writes it.
        """
        ...

    def batch(self, shard: Shard, cursor: int) -> Batch:
        """The `cursor`-th batch (cursor >= 0) of that shard, as numpy arrays. Pure.

        A learner that resumes at its cursor therefore continues where it was, and no two shards of
        one count share a training window within a pass over the data.
        """
        ...

    def step(self, params: Params, inner: Inner, batch: Batch, progress: jax.Array) -> StepResult:
        """One jitted inner step. Donates nothing: the caller may keep the old `params`.

        `progress` is an f32 scalar array in [0, 1], the trained tokens of *all* learners over the
        run's budget. The inner learning rate follows it and nothing else, so that slow, late and
        returned learners stay in phase.
        """
        ...

    def evaluate(self, params: Params) -> float:
        """Held-out loss in `loss_unit` over a fixed held-out sample. Blocks until it is known."""
        ...
