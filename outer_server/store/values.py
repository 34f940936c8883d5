"""The values of all fragments as two safetensors files; what is in them, `snapshot` says.

A fragment is a piece of each file. Neither writing nor reading holds more than a fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from fragments.digest import digest_hex
from fragments.disk import Disk
from fragments.layout import FragmentLayout, Layout
from fragments.runspec import RunSpec
from fragments.tensors import Checksum, Tensor, TensorWriter
from outer_server.core.step import FragmentParameters, outer_optimizer
from outer_server.store.unwritten import Unwritten

WEIGHTS = "weights.safetensors"
SERVER = "server.safetensors"


def write_values(
    disk: Disk,
    directory: Path,
    spec: RunSpec,
    layout: Layout,
    unwritten: Unwritten,
    digests: Sequence[str],
) -> dict[str, tuple[Checksum, ...]]:
    """Write both files, durably, and let go of each fragment that is in them.

    Returns their checksums, by the file's name. Raises OSError, and ValueError for a fragment whose
    broadcast copy has another digest than that of `digests`.
    """
    leaves, _ = _outer_leaves(spec, layout)
    weights_pieces = [list(_specs(part, "")) for part in layout.fragments]
    server_pieces = [_server_piece(layout, part, leaves) for part in layout.fragments]
    with (
        TensorWriter(disk, directory / WEIGHTS, weights_pieces) as weights,
        TensorWriter(disk, directory / SERVER, server_pieces) as server,
    ):

        def write(index: int, values: FragmentParameters) -> None:
            part = layout.fragments[index]
            found = digest_hex(values.broadcast_BxN)
            if found != digests[index]:
                raise ValueError(f"fragment {index} has digest {found}, and not {digests[index]}")
            weights.write(index, _tensors(part, values.broadcast_BxN))
            server.write(index, _server_tensors(part, values))

        unwritten.write(write)
        return {WEIGHTS: weights.finish(), SERVER: server.finish()}


def read_values(directory: Path, spec: RunSpec, layout: Layout) -> tuple[FragmentParameters, ...]:
    """What `write_values` wrote.

    Raises OSError, SafetensorError, KeyError or ValueError for files that are damaged.
    """
    leaves, structure = _outer_leaves(spec, layout)
    # Read, not mapped: pages of a mapped file count as this process's memory.
    with (
        safe_open(directory / WEIGHTS, "np", backend="pread") as weights,
        safe_open(directory / SERVER, "np", backend="pread") as server,
    ):
        fragments = []
        for part in layout.fragments:
            outer = []
            for number, leaf in enumerate(leaves):
                name = f"outer/{part.index}/{number}"
                if leaf.shape == _shape(layout):
                    outer.append(_blocks(layout, part, server.get_tensor, f"{name}/", leaf.dtype))
                else:
                    outer.append(jnp.asarray(server.get_tensor(name), leaf.dtype))
            fragments.append(
                FragmentParameters(
                    _blocks(layout, part, server.get_tensor, "master/"),
                    _blocks(layout, part, weights.get_tensor, ""),
                    jax.tree.unflatten(structure, outer),
                )
            )
        return tuple(fragments)


def write_weights(
    disk: Disk,
    path: Path,
    layout: Layout,
    fragments: Iterable[FragmentParameters],
    words: Mapping[str, str],
) -> None:
    """Write the broadcast copy alone, by tensor path, durably, whole or not at all; `words` go into
    the file's metadata. Raises OSError.
    """
    pieces = [list(_specs(part, "")) for part in layout.fragments]
    draft = path.with_name(f".{path.name}.new")
    try:
        with TensorWriter(disk, draft, pieces, words) as file:
            for part, values in zip(layout.fragments, fragments, strict=True):
                file.write(part.index, _tensors(part, values.broadcast_BxN))
            file.finish()
        disk.rename(draft, path)
        disk.sync_directory(path.parent)
    finally:
        disk.remove(draft)


def _shape(layout: Layout) -> tuple[int, int]:
    return layout.rows_padded, layout.block


def _outer_leaves(spec: RunSpec, layout: Layout) -> tuple[list[jax.ShapeDtypeStruct], Any]:
    """Shapes and dtypes of a fragment's outer state, and the structure of its tree."""
    optimizer = outer_optimizer(spec.outer)
    state = jax.eval_shape(lambda: optimizer.init(jnp.zeros(_shape(layout), jnp.float32)))
    leaves, structure = jax.tree.flatten(state)
    return leaves, structure


def _specs(part: FragmentLayout, prefix: str, dtype: str = "float32") -> Iterator[Tensor]:
    """A fragment value's tensors, by prefixed path."""
    for slot in part.slots:
        yield Tensor(prefix + slot.spec.path, dtype, slot.spec.shape)


def _server_piece(
    layout: Layout, part: FragmentLayout, leaves: Sequence[jax.ShapeDtypeStruct]
) -> list[Tensor]:
    """What server.safetensors has of a fragment."""
    piece = list(_specs(part, "master/"))
    for number, leaf in enumerate(leaves):
        name, dtype = f"outer/{part.index}/{number}", leaf.dtype.name
        if leaf.shape == _shape(layout):
            piece += _specs(part, f"{name}/", dtype)
        else:
            piece.append(Tensor(name, dtype, leaf.shape))
    return piece


def _server_tensors(part: FragmentLayout, values: FragmentParameters) -> Iterator[np.ndarray]:
    """The values of `_server_piece`."""
    yield from _tensors(part, values.master_BxN)
    for leaf in jax.tree.leaves(values.outer):
        if leaf.shape == values.master_BxN.shape:
            yield from _tensors(part, leaf)
        else:
            yield np.asarray(leaf)


def _tensors(part: FragmentLayout, blocks: Any) -> Iterator[np.ndarray]:
    """A fragment value as views of the model's shapes, in the order of its slots."""
    blocks_BxN = np.asarray(blocks)
    for slot in part.slots:
        flat = blocks_BxN[slot.row_start : slot.row_stop].reshape(-1)[: slot.size]
        yield flat.reshape(slot.spec.shape)


def _blocks(
    layout: Layout,
    part: FragmentLayout,
    read: Callable[[str], np.ndarray],
    prefix: str,
    dtype: Any = np.float32,
) -> jax.Array:
    """Undoes `_tensors`: each tensor as `read` gives it by its prefixed path."""
    blocks_BxN = np.zeros(_shape(layout), dtype)
    for slot in part.slots:
        flat = blocks_BxN[slot.row_start : slot.row_stop].reshape(-1)
        flat[: slot.size] = read(prefix + slot.spec.path).reshape(-1)
    return jnp.asarray(blocks_BxN)
