"""The transformer against a plain numpy one, and what it may see."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.reference.model import Transformer, create, mean_loss
from learner.reference.settings import ReferenceSettings

SETTINGS = ReferenceSettings(width=16, depth=2, heads=2, seq_len=12)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return create(SETTINGS, jax.random.key(7))


@eqx.filter_jit
def forward(model: Transformer, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def numpy_logits(model: Any, tokens: np.ndarray, heads: int) -> np.ndarray:
    """The same transformer in float64, one loop at a time (Vaswani 2017; Su 2021 for rotation)."""

    def norm(x: np.ndarray, weight: Any) -> np.ndarray:
        scaled: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * np.asarray(weight, np.float64)

    def rotate(x: np.ndarray) -> np.ndarray:
        half = x.shape[1] // 2
        angle = np.outer(np.arange(len(x)), 10_000.0 ** (-np.arange(half) / half))
        a, b = x[:, :half], x[:, half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    def matrix(layer: Any) -> np.ndarray:
        return np.asarray(layer.weight, np.float64).T

    x = np.asarray(model.embedding.weight, np.float64)[tokens]
    hidden_future = np.triu(np.full((len(tokens), len(tokens)), -np.inf), k=1)
    for block in model.blocks:
        h, attention = norm(x, block.attention_norm.weight), block.attention
        q, k, v = (
            np.split(h @ matrix(p), heads, axis=1)
            for p in (attention.query_proj, attention.key_proj, attention.value_proj)
        )
        outputs = []
        for q_LxK, k_LxK, v_LxK in zip(q, k, v, strict=True):
            scores = rotate(q_LxK) @ rotate(k_LxK).T / np.sqrt(q_LxK.shape[1]) + hidden_future
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(weights / weights.sum(-1, keepdims=True) @ v_LxK)
        x = x + np.concatenate(outputs, axis=1) @ matrix(attention.output_proj)
        first, last = block.mlp.layers
        x = x + np.maximum(norm(x, block.mlp_norm.weight) @ matrix(first), 0) @ matrix(last)
    logits: np.ndarray = norm(x, model.norm.weight) @ matrix(model.head)
    return logits


def test_equals_a_plain_numpy_transformer(model: Transformer) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 12)
    logits = forward(model, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(logits, numpy_logits(model, tokens, heads=2), rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_mean_surprise_of_the_next_byte(model: Transformer) -> None:
    windows = np.random.default_rng(1).integers(0, 256, (3, 13)).astype(np.uint8)
    surprises = []
    for window in windows:
        logits = numpy_logits(model, window[:-1], heads=2)
        log_total = np.log(np.exp(logits).sum(axis=1))
        surprises += (log_total - logits[np.arange(12), window[1:]]).tolist()
    loss = eqx.filter_jit(mean_loss)(model, jnp.asarray(windows))
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(float(np.mean(surprises)), rel=1e-5)


def test_no_position_sees_what_follows_it(model: Transformer) -> None:
    tokens = jnp.arange(12, dtype=jnp.int32)
    before = np.asarray(forward(model, tokens))
    for changed in (0, 5, 11):
        after = np.asarray(forward(model, tokens.at[changed].set(200)))
        np.testing.assert_array_equal(after[:changed], before[:changed])
        assert (after[changed:] != before[changed:]).any(axis=1).all()


def test_a_fresh_model_knows_nothing_yet(model: Transformer) -> None:
    logits = forward(model, jnp.arange(12, dtype=jnp.int32))
    probabilities = jax.nn.softmax(logits)
    entropy = -jnp.sum(probabilities * jnp.log2(probabilities), axis=-1)
    assert float(entropy.min()) > 7.0


def test_every_array_is_float32_and_named_by_its_layer(model: Transformer) -> None:
    leaves = jax.tree_util.tree_flatten_with_path(eqx.filter(model, eqx.is_array))[0]
    assert {str(leaf.dtype) for _, leaf in leaves} == {"float32"}
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert ".embedding.weight" in paths
    assert ".blocks[1].attention.query_proj.weight" in paths
    assert len(paths) == 3 + 8 * SETTINGS.depth
