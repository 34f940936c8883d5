"""The reference model, data and inner optimizer as a `learner.program.Program`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32, UInt8

from learner.program import Inner, Params, Shard, StepResult
from learner.reference.bigram import bigram_bits_per_byte
from learner.reference.corpus import Corpus, standard_library
from learner.reference.inner import build_inner
from learner.reference.model import Transformer, create, mean_loss
from learner.reference.settings import ReferenceSettings
from learner.reference.userdata import user_corpus
from learner.reference.windows import Windows

_HELD_OUT_SEED = 0
"""One constant, so that every run on one corpus is judged on the same held-out sample."""


class ReferenceProgram:
    """A byte-level transformer on a `Corpus`; `seed` orders its training windows.

    All learners of a run need the same settings, corpus and `seed`, or their shards overlap.

    Raises:
        DataError: when either side of the corpus does not fill one window.
    """

    loss_unit = "bits per byte"

    def __init__(self, settings: ReferenceSettings, corpus: Corpus, seed: int = 0) -> None:
        self.settings = settings
        self.corpus = corpus
        self.identity = (
            f"reference-transformer-1 tokens=bytes width={settings.width} depth={settings.depth} "
            f"heads={settings.heads}"
        )
        self.data_digest = corpus.manifest_digest
        self.tokens_per_step = settings.batch_size * settings.seq_len
        self._windows = Windows(
            corpus.train, settings.seq_len, seed, contiguous=settings.shards == "contiguous"
        )
        self._held_out = _held_out_sample(corpus, settings)
        self._inner = build_inner(settings)
        self._static = _static_part(settings)
        self._init_params = jax.jit(self._traced_init)
        self._step = jax.jit(self._traced_step)
        self._evaluate = jax.jit(self._traced_evaluate)

    def init_params(self, seed: int) -> Params:
        """Fresh f32 parameters: an equinox module without its non-float parts. Pure in `seed`."""
        params: Params = self._init_params(jax.random.key(seed))
        return params

    def init_inner(self, params: Params) -> Inner:
        """Fresh AdamW state."""
        return self._inner.init(params)

    def averaged(self, path: str) -> bool:
        """True for the token embedding."""
        return path.startswith(".embedding")

    def batch(self, shard: Shard, cursor: int) -> UInt8[np.ndarray, "batch window"]:
        """The `cursor`-th batch of `shard`: u8[batch_size, seq_len + 1]. Pure.

        Raises:
            DataError: when there are more shards than windows.
            ValueError: for a negative `cursor`.
        """
        size = self.settings.batch_size
        return self._windows.take(self._windows.indices(shard, cursor * size, size))

    def step(
        self,
        params: Params,
        inner: Inner,
        batch: UInt8[np.ndarray, "batch window"],
        progress: Float32[Array, ""],
    ) -> StepResult:
        """One AdamW step on `batch`; dispatches and returns at once, donates nothing."""
        return StepResult(*self._step(params, inner, batch, progress))

    def gradient(
        self, params: Params, batch: UInt8[Array, "batch window"]
    ) -> tuple[Float32[Array, ""], Params]:
        """The first half of a step: loss and gradient. To be traced, as `updated` is."""
        loss, gradient = jax.value_and_grad(self._loss)(params, batch)
        return loss, gradient

    def updated(
        self, params: Params, inner: Inner, gradient: Params, progress: Float32[Array, ""]
    ) -> tuple[Params, Inner]:
        """The second half: parameters and AdamW state after a step with that gradient."""
        # optax's Adam raises a float to its int32 count, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            updates, inner = self._inner.update(gradient, inner, params, progress=progress)
        return optax.apply_updates(params, updates), inner

    def evaluate(self, params: Params) -> float:
        """Held-out bits per byte over a fixed sample of `eval_windows` windows; one host sync."""
        return float(self._evaluate(params, self._held_out)) / math.log(2.0)

    def bigram_loss(self) -> float:
        """Bits per byte of a bigram model of the training bytes, on the sample of `evaluate`."""
        rows = self._held_out.reshape(-1, self.settings.seq_len + 1)
        return bigram_bits_per_byte(self.corpus.train, rows)

    def _traced_init(self, key: Array) -> Params:
        return eqx.filter(create(self.settings, key), eqx.is_inexact_array)

    def _loss(self, params: Params, windows: UInt8[Array, "batch window"]) -> Float32[Array, ""]:
        return mean_loss(eqx.combine(params, self._static), windows)

    def _traced_step(
        self,
        params: Params,
        inner: Inner,
        batch: UInt8[Array, "batch window"],
        progress: Float32[Array, ""],
    ) -> tuple[Params, Inner, Float32[Array, ""]]:
        loss, gradient = self.gradient(params, batch)
        params, inner = self.updated(params, inner, gradient, progress)
        return params, inner, loss

    def _traced_evaluate(
        self, params: Params, held_out: UInt8[Array, "batches batch window"]
    ) -> Float32[Array, ""]:
        # Batch by batch inside one program: activations stay as small as a training step's.
        return jnp.mean(jax.lax.map(lambda windows: self._loss(params, windows), held_out))


def build(settings: Mapping[str, Any], data: str | None, seed: int) -> ReferenceProgram:
    """The program from a run's settings; `data` is a path or glob, None the standard library.

    Raises:
        pydantic.ValidationError: for an unknown or ill-typed setting.
        DataError: when the data cannot be used; the message says why and where.
    """
    corpus = standard_library() if data is None else user_corpus(data)
    return ReferenceProgram(ReferenceSettings.model_validate(dict(settings)), corpus, seed)


def _static_part(settings: ReferenceSettings) -> Transformer:
    """The model without its float arrays, from shapes alone: no array is made."""
    shapes = eqx.filter_eval_shape(create, settings, jax.random.key(0))
    static: Transformer = eqx.filter(
        shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True
    )
    return static


def _held_out_sample(
    corpus: Corpus, settings: ReferenceSettings
) -> UInt8[np.ndarray, "batches batch window"]:
    """Whole batches of distinct held-out windows; fewer than asked for if the text is short."""
    windows = Windows(corpus.held_out, settings.seq_len, _HELD_OUT_SEED)
    count = min(settings.eval_windows, windows.count)
    batch = min(settings.batch_size, count)
    count -= count % batch
    rows = windows.take(windows.indices(Shard(0, 1), 0, count))
    return rows.reshape(count // batch, batch, settings.seq_len + 1)
