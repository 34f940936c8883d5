"""Between a model's pytree of parameters and the fragment values of its layout.

Shape letters: B rows (blocks), N values per row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from fragments.errors import LayoutError
from fragments.layout import FLOAT_DTYPES, FragmentLayout, Layout, TensorSpec
from fragments.memory import is_in_memory, on_device, subtract
from fragments.slabs import empty

PathMatcher = Callable[[str], bool] | Sequence[str]
"""Chooses leaves by path: a predicate, or regular expressions of which one is found in it."""


def tensor_specs(
    tree: Any, averaged: PathMatcher = (), local: PathMatcher = ()
) -> tuple[TensorSpec, ...]:
    """Describes the leaves of `tree` that are synchronised, in the tree's order.

    Leaves may be arrays or `jax.ShapeDtypeStruct`. Paths are those of `jax.tree_util.keystr`,
    such as `['embed']` or `.layers[0].weight`. `averaged` leaves, and all with at most one value,
    are merged by the token-weighted average. `local` leaves stay with their learner.

    Raises LayoutError, naming the path, for a leaf that is neither local nor a floating-point
    array of FLOAT_DTYPES.
    """
    is_averaged = _predicate(averaged)
    specs = []
    for path, leaf in _synchronised_leaves(tree, local):
        spec = _describe(path, leaf)
        if spec.size <= 1 or is_averaged(path):
            spec = TensorSpec(spec.path, spec.shape, spec.dtype, averaged=True)
        specs.append(spec)
    return tuple(specs)


class TreeCodec:
    """Packs a tree's leaves into fragment values and puts fragment values back into the tree.

    Args:
        layout: the run's layout.
        tree: a tree of the model's structure; its leaves' values are not kept.
        local: the same matcher that the layout's specs were made with.

    Raises LayoutError when the tree's tensors are not those of the layout.
    """

    def __init__(self, layout: Layout, tree: Any, local: PathMatcher = ()) -> None:
        self.layout = layout
        leaves_with_path, treedef = jax.tree_util.tree_flatten_with_path(tree)
        self._treedef: Any = treedef
        position_of = {
            jax.tree_util.keystr(path): position
            for position, (path, _) in enumerate(leaves_with_path)
        }
        found = {path: _describe(path, leaf) for path, leaf in _synchronised_leaves(tree, local)}
        _check_same_tensors(layout, found)
        self._positions = tuple(
            tuple(position_of[slot.spec.path] for slot in fragment.slots)
            for fragment in layout.fragments
        )

    def pack(self, p: int, tree: Any) -> Float[Array, "B N"]:
        """Fragment `p` of `tree` as a new float32 array (layout.rows_padded, layout.block).

        Raises LayoutError when the tree's structure is not that of the layout.
        """
        leaves = self._leaves_of(tree)
        return pack_fragment(self.layout, p, [leaves[i] for i in self._positions[p]])

    def progress(self, p: int, base_BxN: Float32[Array, "B N"], tree: Any) -> Float32[Array, "B N"]:
        """base - `pack`: what training took off fragment `p` since it was `base_BxN`.

        In memory in one go; elsewhere by the device. Raises LayoutError as `pack`.
        """
        leaves = [self._leaves_of(tree)[i] for i in self._positions[p]]
        is_plain = all(leaf.dtype == jnp.float32 and is_in_memory(leaf) for leaf in leaves)
        if not (is_plain and is_in_memory(base_BxN)):
            return base_BxN - pack_fragment(self.layout, p, leaves)
        made_BxN, bases_BxN = empty(base_BxN.shape, np.float32), np.asarray(base_BxN)
        made_BxN[:] = 0
        for slot, leaf in zip(self.layout.fragments[p].slots, leaves, strict=True):
            rows = slice(slot.row_start, slot.row_stop)
            base, made = bases_BxN[rows].reshape(-1), made_BxN[rows].reshape(-1)
            subtract(base[: slot.size], np.asarray(leaf).reshape(-1), made[: slot.size])
        return on_device(made_BxN)

    def replace(self, p: int, tree: Any, blocks_BxN: Float[Array, "B N"]) -> Any:
        """`tree` with the leaves of fragment `p` replaced from `blocks_BxN`, in their own dtype.

        All other leaves are the same objects as in `tree`. Where they can be, the new ones are
        views of the value: as long as nothing else replaces them, they take no memory. Raises
        LayoutError when the tree's structure or the value's shape is not that of the layout.
        """
        leaves = self._leaves_of(tree)
        new_leaves = unpack_fragment(self.layout, p, blocks_BxN)
        for position, leaf in zip(self._positions[p], new_leaves, strict=True):
            leaves[position] = leaf
        return jax.tree_util.tree_unflatten(self._treedef, leaves)

    def warm_up(self, tree: Any) -> None:
        """Compiles pack and replace of every fragment for leaves placed as those of `tree`.

        Their shapes differ from fragment to fragment, so each is compiled once; after this no
        synchronisation waits for the compiler.
        """
        for p in range(len(self.layout.fragments)):
            for leaf in unpack_fragment(self.layout, p, self.pack(p, tree)):
                leaf.block_until_ready()

    def _leaves_of(self, tree: Any) -> list[Any]:
        leaves: list[Any]
        treedef: Any
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        if treedef != self._treedef:
            raise LayoutError(
                f"the tree's structure changed since the layout was checked: {treedef} is not"
                f" {self._treedef}"
            )
        return leaves


def pack_fragment(layout: Layout, p: int, leaves: Sequence[Array]) -> Float[Array, "B N"]:
    """Fragment `p` from its leaves, in the order of its slots: float32 (rows_padded, block).

    Padding is zero. May be called under jit.
    """
    fragment = layout.fragments[p]
    if len(leaves) != len(fragment.slots):
        raise LayoutError(
            f"fragment {p} has {len(fragment.slots)} tensors, but {len(leaves)} leaves were given"
        )
    blocks_BxN: Array = _pack(fragment, layout.rows_padded, tuple(leaves))
    return blocks_BxN


def unpack_fragment(layout: Layout, p: int, blocks_BxN: Float[Array, "B N"]) -> list[Array]:
    """The leaves of fragment `p`, in the order of its slots, in their own shape and dtype: views of
    the value, where it is there, in the host's memory, and of their dtype.

    Undoes `pack_fragment`, to the bit. Casting to a narrower dtype rounds to nearest even. May be
    called under jit.
    """
    if blocks_BxN.shape != (layout.rows_padded, layout.block):
        raise LayoutError(
            f"a fragment value has shape {blocks_BxN.shape}; this layout's have"
            f" {(layout.rows_padded, layout.block)}"
        )
    fragment = layout.fragments[p]
    if _can_be_viewed(fragment, blocks_BxN):
        return _views(fragment, np.asarray(blocks_BxN))
    return list(_unpack(fragment, blocks_BxN))


@partial(jax.jit, static_argnums=(0, 1))
def _pack(
    fragment: FragmentLayout, rows_padded: int, leaves: tuple[Array, ...]
) -> Float[Array, "B N"]:
    pieces: list[Array] = []
    for slot, leaf in zip(fragment.slots, leaves, strict=True):
        if leaf.shape != slot.spec.shape:
            raise LayoutError(f"{slot.spec.path} has shape {leaf.shape}, not {slot.spec.shape}")
        pieces.append(leaf.reshape(-1).astype(jnp.float32))
        padding = (slot.row_stop - slot.row_start) * fragment.block - slot.size
        pieces.append(jnp.zeros(padding, jnp.float32))
    pieces.append(jnp.zeros((rows_padded - fragment.num_rows) * fragment.block, jnp.float32))
    return jnp.concatenate(pieces).reshape(rows_padded, fragment.block)


@partial(jax.jit, static_argnums=0)
def _unpack(fragment: FragmentLayout, blocks_BxN: Float[Array, "B N"]) -> tuple[Array, ...]:
    def leaf(row_start: int, row_stop: int, spec: TensorSpec) -> Array:
        values = blocks_BxN[row_start:row_stop].reshape(-1)[: spec.size]
        return values.astype(jnp.dtype(spec.dtype)).reshape(spec.shape)

    return tuple(leaf(slot.row_start, slot.row_stop, slot.spec) for slot in fragment.slots)


def _can_be_viewed(fragment: FragmentLayout, blocks_BxN: Any) -> bool:
    """Whether its leaves are stretches of it that can be had without waiting."""
    if isinstance(blocks_BxN, jax.core.Tracer) or not blocks_BxN.is_ready():
        return False
    is_here = blocks_BxN.devices() == {jax.devices()[0]} and jax.default_backend() == "cpu"
    return is_here and all(slot.spec.dtype == "float32" for slot in fragment.slots)


def _views(fragment: FragmentLayout, blocks_BxN: Float32[np.ndarray, "B N"]) -> list[Array]:
    """What `_unpack` makes, without copying: jax takes an array of the host's memory as it is,
    which keeps that memory. Only one that is not aligned to a cache line is copied.
    """

    def leaf(row_start: int, row_stop: int, spec: TensorSpec) -> Array:
        values = blocks_BxN[row_start:row_stop].reshape(-1)[: spec.size]
        shared: Array = jax.device_put(values.reshape(spec.shape))
        return shared

    return [leaf(slot.row_start, slot.row_stop, slot.spec) for slot in fragment.slots]


def _predicate(matcher: PathMatcher) -> Callable[[str], bool]:
    if callable(matcher):
        return matcher
    if isinstance(matcher, str):
        matcher = (matcher,)
    patterns = [re.compile(pattern) for pattern in matcher]
    return lambda path: any(pattern.search(path) for pattern in patterns)


def _synchronised_leaves(tree: Any, local: PathMatcher) -> list[tuple[str, Any]]:
    is_local = _predicate(local)
    leaves_with_path, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = ((jax.tree_util.keystr(path), leaf) for path, leaf in leaves_with_path)
    return [(path, leaf) for path, leaf in named if not is_local(path)]


def _describe(path: str, leaf: Any) -> TensorSpec:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise LayoutError(
            f"{path or 'the tree'} is a {type(leaf).__name__}, not an array: make it a float32"
            " array, filter it out of the parameters, or declare it local"
        )
    dtype = str(leaf.dtype)
    if dtype not in FLOAT_DTYPES:
        raise LayoutError(
            f"{path or 'the tree'} has dtype {dtype}; only {', '.join(FLOAT_DTYPES)} can be"
            " synchronised: cast it, or declare it local"
        )
    return TensorSpec(path, tuple(leaf.shape), dtype)


def _check_same_tensors(layout: Layout, found: dict[str, TensorSpec]) -> None:
    expected = {spec.path: spec for spec in layout.tensors}
    for path in sorted(expected.keys() | found.keys()):
        if path not in found:
            raise LayoutError(f"the layout has {path}, which this model lacks")
        if path not in expected:
            raise LayoutError(f"this model has {path}, which the layout lacks")
        here, there = found[path], expected[path]
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            raise LayoutError(
                f"{path} is {here.dtype}{list(here.shape)} in this model, but"
                f" {there.dtype}{list(there.shape)} in the layout"
            )
