"""A learner's checkpoints: one directory each, written beside and renamed into place.

3-000000120/           of the process whose lease had token 3, after its step 120
manifest.json          whose it is, its counters and bases, checksums of all files
state.safetensors      params/<path>, inner/<path>, and base/<fragment> (float32, rows x block)

Tokens only rise, so the newest checkpoint is that of the newest process, also where an older one of
the same name, fenced off meanwhile, still wrote its last. Checksums say whether the disk kept what
was written; they protect from nobody who means harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import structlog
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from fragments.digest import digest_hex
from fragments.disk import REAL_DISK, Disk, write_atomically
from fragments.errors import CheckpointError
from fragments.layout import Layout
from fragments.records import Version
from fragments.sealed import seal, unseal
from fragments.tensors import Checksum, Tensor, TensorWriter, check
from learner.held import Base, Checkpoint, Completed
from learner.program import Inner, Params, Shard

FORMAT = 2
KEPT = 2
"""Checkpoints kept; older ones are removed once a newer one is in place."""

_MANIFEST = "manifest.json"
_STATE = "state.safetensors"
_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    SafetensorError,
)
"""What reading a damaged checkpoint may raise."""

_log = structlog.get_logger(__name__)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Held(_Model):
    """A base without its value."""

    epoch: int
    version: int
    digest: str
    step: int
    tokens: int
    cursor: int


class _Manifest(_Model):
    format: int
    run_id: str
    layout_digest: str
    learner: str
    incarnation: str
    token: int
    shard_index: int
    shard_count: int
    step: int
    tokens: int
    cursor: int
    bases: tuple[_Held | None, ...]
    crc32c: dict[str, tuple[Checksum, ...]]


@dataclass(frozen=True, slots=True)
class Writer:
    """Which process writes: its lease's token, and its incarnation."""

    token: int
    incarnation: str


class Checkpoints:
    """Those of one learner of one run in a directory, which is made if need be.

    Not thread-safe: read once, then written by one thread.
    """

    def __init__(
        self,
        directory: Path,
        run_id: str,
        layout: Layout,
        learner: str,
        disk: Disk = REAL_DISK,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._run_id = run_id
        self._layout = layout
        self._learner = learner

    def write(self, writer: Writer, checkpoint: Checkpoint) -> Path:
        """Write it durably, then remove older ones; return its directory.

        Takes no memory beside the values, on a processor. Raises CheckpointError, and leaves the
        older ones, where it cannot be written.
        """
        target = self._directory / f"{writer.token}-{checkpoint.completed.step:09d}"
        draft = self._directory / f".{target.name}.new"
        disk = self._disk
        if target.exists():  # The last one of a learner that stops may be there already.
            return target
        try:
            if not self._directory.exists():
                disk.make_directory(self._directory)
                disk.sync_directory(self._directory.parent)
            disk.remove(draft)
            disk.make_directory(draft)
            self._write(draft, writer, checkpoint)
            disk.rename(draft, target)
            disk.sync_directory(self._directory)
        except (OSError, KeyError, ValueError) as error:
            with suppress(OSError):
                disk.remove(draft)
            raise CheckpointError(
                f"no checkpoint can be written to {self._directory}: {error}"
            ) from error
        for old in self._finished()[:-KEPT]:
            disk.remove(old)
        return target

    def newest(self, params: Params, init_inner: Callable[[Params], Inner]) -> Checkpoint | None:
        """The newest checkpoint that is whole and fits the program; None where there is none.

        Others are passed over, with a warning, and what was never finished is removed. Raises
        CheckpointError where there is one of another run, layout or learner.

        Args:
            params: a tree of the model's structure.
            init_inner: makes an inner state, of which structure, shapes and dtypes count.
        """
        for draft in self._directory.glob(".*.new"):
            self._disk.remove(draft)
        for path in reversed(self._finished()):
            try:
                manifest = _manifest(path)
                self._check_owner(path, manifest)
                return self._read(path, manifest, params, init_inner(params))
            except ValidationError as error:
                reason = f"{_MANIFEST}: {error.error_count()} faults"
            except _DAMAGE as error:
                reason = str(error)
            _log.warning("checkpoint_passed_over", checkpoint=path.name, reason=reason)
        return None

    def _finished(self) -> list[Path]:
        """Oldest first."""
        found = []
        for path in self._directory.glob("*-*"):
            token, _, step = path.name.partition("-")
            if token.isdecimal() and step.isdecimal():
                found.append((int(token), int(step), path))
        return [path for *_, path in sorted(found)]

    def _check_owner(self, path: Path, found: _Manifest) -> None:
        what = {
            "run": (found.run_id, self._run_id),
            "learner": (found.learner, self._learner),
            "layout": (found.layout_digest[:16], self._layout.digest[:16]),
        }
        for word, (theirs, ours) in what.items():
            if theirs != ours:
                raise CheckpointError(
                    f"{path} is a checkpoint of {word} {theirs!r}, and this is {word} {ours!r}: "
                    "name another --checkpoint-dir, or move what is in this one away"
                )

    def _write(self, draft: Path, writer: Writer, checkpoint: Checkpoint) -> None:
        now = checkpoint.completed
        trees = [*_leaves("params", now.params), *_leaves("inner", checkpoint.inner)]
        leaves = [(name, _plain(leaf)) for name, leaf in trees]
        bases = [(p, base) for p, base in enumerate(now.bases) if base is not None]
        pieces = [[Tensor(name, leaf.dtype.name, leaf.shape)] for name, leaf in leaves]
        pieces += [[Tensor(f"base/{p}", "float32", self._shape(p))] for p, _ in bases]
        with TensorWriter(self._disk, draft / _STATE, pieces) as file:
            for index, (_, leaf) in enumerate(leaves):
                file.write(index, [np.asarray(leaf)])
            for index, (p, base) in enumerate(bases, len(leaves)):
                # Without the rows that only fill it up.
                file.write(index, [np.asarray(base.value_BxN)[: self._shape(p)[0]]])
            sums = file.finish()
        manifest = _Manifest(
            format=FORMAT,
            run_id=self._run_id,
            layout_digest=self._layout.digest,
            learner=self._learner,
            incarnation=writer.incarnation,
            token=writer.token,
            shard_index=now.shard.index,
            shard_count=now.shard.count,
            step=now.step,
            tokens=now.tokens,
            cursor=now.cursor,
            bases=tuple(None if base is None else _held(base) for base in now.bases),
            crc32c={_STATE: sums},
        )
        write_atomically(self._disk, draft / _MANIFEST, seal(manifest.model_dump(mode="json")))

    def _shape(self, fragment: int) -> tuple[int, int]:
        return self._layout.fragments[fragment].num_rows, self._layout.block

    def _read(self, path: Path, manifest: _Manifest, params: Params, inner: Inner) -> Checkpoint:
        for name, sums in manifest.crc32c.items():
            check(path / name, sums)
        # Read, not mapped: the file may be removed while its values are still in use.
        with safe_open(path / _STATE, "np", backend="pread") as file:
            completed = Completed(
                manifest.step,
                manifest.tokens,
                manifest.cursor,
                _tree("params", params, file.get_tensor),
                tuple(
                    None if held is None else self._base(fragment, held, file.get_tensor)
                    for fragment, held in enumerate(manifest.bases)
                ),
                Shard(manifest.shard_index, manifest.shard_count),
            )
            return Checkpoint(completed, _tree("inner", inner, file.get_tensor))

    def _base(self, fragment: int, held: _Held, read: Callable[[str], np.ndarray]) -> Base:
        value_BxN = np.zeros((self._layout.rows_padded, self._layout.block), np.float32)
        value_BxN[: self._shape(fragment)[0]] = read(f"base/{fragment}")
        placed_BxN = jnp.asarray(value_BxN)
        if digest_hex(placed_BxN) != held.digest:
            raise ValueError(f"base/{fragment} does not have the digest of {_MANIFEST}")
        version = Version(held.epoch, held.version)
        return Base(version, placed_BxN, held.digest, held.step, held.tokens, held.cursor)


def _manifest(path: Path) -> _Manifest:
    """Of a checkpoint. Raises what _DAMAGE names where it is damaged, or of a format not known."""
    return _Manifest.model_validate(unseal((path / _MANIFEST).read_bytes(), FORMAT))


def _held(base: Base) -> _Held:
    return _Held(
        epoch=base.version.epoch,
        version=base.version.number,
        digest=base.digest,
        step=base.step,
        tokens=base.tokens,
        cursor=base.cursor,
    )


def _leaves(prefix: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves by prefixed path."""
    for where, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield f"{prefix}/{jax.tree_util.keystr(where)}", leaf


def _is_key(leaf: Any) -> bool:
    """Is it an array of random keys, whose numbers lie below?"""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf)


def _tree(prefix: str, like: Any, read: Callable[[str], np.ndarray]) -> Any:
    """Undoes `_leaves`. Raises ValueError or SafetensorError where it is no tree like `like`."""

    def leaf(where: Any, expected: Any) -> Any:
        name = f"{prefix}/{jax.tree_util.keystr(where)}"
        value, wanted = read(name), _plain(expected)
        if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"{name} is {value.dtype}{list(value.shape)}, and this program's is "
                f"{wanted.dtype}{list(wanted.shape)}"
            )
        is_spread = len(wanted.sharding.device_set) > 1
        placed = jax.device_put(value, wanted.sharding) if is_spread else jnp.asarray(value)
        if _is_key(expected):
            return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(expected))
        return placed

    return jax.tree_util.tree_map_with_path(leaf, like)
