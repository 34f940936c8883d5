"""A small decoder-only transformer over bytes, its layers from equinox.

Shape letters, used as suffixes: B batch, L length, W window (L + 1), H heads, K head size,
D width, V vocabulary, I and O a layer's inputs and outputs.

Every array is float32 but for the token ids; nothing relies on implicit dtype promotion.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32, PRNGKeyArray, UInt8

from learner.reference.settings import ReferenceSettings

VOCABULARY = 256
"""Tokens are bytes."""


class RowLinear(eqx.nn.Linear):
    """`equinox.nn.Linear` without bias, as x·Wᵀ instead of W·x: equal values, other axis order.

    Under `vmap` over batch and length, W·x comes out feature-first, and XLA's CPU backend puts it
    back in a pass of its own: 83 ms for a training step of width 128 and depth 2, 60 ms this way.
    """

    def __init__(self, linear: eqx.nn.Linear) -> None:
        self.weight = linear.weight
        self.bias = None
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.use_bias = False

    def __call__(
        self, x: Float32[Array, " I"], *, key: PRNGKeyArray | None = None
    ) -> Float32[Array, " O"]:
        """The image of `x`; `key` is equinox's convention and unused."""
        return jax.lax.dot_general(x, self.weight, (((0,), (1,)), ((), ())))


class Block(eqx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    attention_norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP
    rope: eqx.nn.RotaryPositionalEmbedding

    def __init__(self, width: int, heads: int, key: PRNGKeyArray) -> None:
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = eqx.nn.RMSNorm(width, use_bias=False, dtype=jnp.float32)
        self.attention = eqx.nn.MultiheadAttention(
            heads, width, dtype=jnp.float32, key=attention_key
        )
        self.mlp_norm = eqx.nn.RMSNorm(width, use_bias=False, dtype=jnp.float32)
        # relu: at the demo's size the same held-out loss as gelu (2.81, 2.80), a third cheaper.
        self.mlp = eqx.nn.MLP(
            width,
            width,
            4 * width,
            depth=1,
            activation=jax.nn.relu,
            use_bias=False,
            use_final_bias=False,
            dtype=jnp.float32,
            key=mlp_key,
        )
        self.rope = eqx.nn.RotaryPositionalEmbedding(width // heads, dtype=jnp.float32)

    def __call__(self, x_LxD: Float32[Array, "L D"]) -> Float32[Array, "L D"]:
        """The residual stream after this block; a position sees itself and those before it."""
        h_LxD = jax.vmap(self.attention_norm)(x_LxD)
        causal_LxL = jnp.tril(jnp.ones((x_LxD.shape[0], x_LxD.shape[0]), dtype=jnp.bool_))
        x_LxD = x_LxD + self.attention(
            h_LxD, h_LxD, h_LxD, mask=causal_LxL, process_heads=self._rotate
        )
        return x_LxD + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x_LxD))

    def _rotate(
        self,
        q_LxHxK: Float32[Array, "L H K"],
        k_LxHxK: Float32[Array, "L H K"],
        v_LxHxK: Float32[Array, "L H K"],
    ) -> tuple[Float32[Array, "L H K"], Float32[Array, "L H K"], Float32[Array, "L H K"]]:
        rotate = jax.vmap(self.rope, in_axes=1, out_axes=1)
        return rotate(q_LxHxK), rotate(k_LxHxK), v_LxHxK


class Transformer(eqx.Module):
    """Bytes in, logits of the next byte out."""

    embedding: eqx.nn.Embedding
    blocks: tuple[Block, ...]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, settings: ReferenceSettings, key: PRNGKeyArray) -> None:
        embedding_key, head_key, *block_keys = jax.random.split(key, 2 + settings.depth)
        width = settings.width
        self.embedding = eqx.nn.Embedding(VOCABULARY, width, dtype=jnp.float32, key=embedding_key)
        self.blocks = tuple(Block(width, settings.heads, key) for key in block_keys)
        self.norm = eqx.nn.RMSNorm(width, use_bias=False, dtype=jnp.float32)
        self.head = eqx.nn.Linear(
            width, VOCABULARY, use_bias=False, dtype=jnp.float32, key=head_key
        )

    def __call__(self, tokens_L: Int32[Array, " L"]) -> Float32[Array, "L V"]:
        """Logits, at each position, of the token that follows it."""
        x_LxD = jax.vmap(self.embedding)(tokens_L)
        for block in self.blocks:
            x_LxD = block(x_LxD)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x_LxD))


def create(settings: ReferenceSettings, key: PRNGKeyArray) -> Transformer:
    """A model at birth: equinox's initial values, what each block adds scaled by (2·depth)^-1/2.

    The scaling (GPT-2, Radford et al. 2019, section 2.3) keeps the residual stream's variance from
    growing with depth.
    """

    def residual_outputs(model: Transformer) -> list[Any]:
        weights = []
        for block in model.blocks:
            weights += [block.attention.output_proj.weight, block.mlp.layers[-1].weight]
        return weights

    scale = (2 * settings.depth) ** -0.5
    model = eqx.tree_at(
        residual_outputs, Transformer(settings, key), replace_fn=lambda w: w * scale
    )
    row_major: Transformer = jax.tree.map(
        lambda node: RowLinear(node) if _is_linear(node) else node, model, is_leaf=_is_linear
    )
    return row_major


def mean_loss(model: Transformer, windows: UInt8[Array, "B W"]) -> Float32[Array, ""]:
    """Mean cross-entropy of each window's bytes given those before it; nats per byte, f32."""
    tokens = windows.astype(jnp.int32)
    logits_BxLxV = jax.vmap(model)(tokens[:, :-1])
    losses_BxL = optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, tokens[:, 1:])
    return jnp.mean(losses_BxL)


def _is_linear(node: object) -> bool:
    return isinstance(node, eqx.nn.Linear)
