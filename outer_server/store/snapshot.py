"""Snapshots: one directory each, written beside and renamed into place.

snapshots/000042/
manifest.json            format, digests, file checksums
state.json               the scheduler's state
weights.safetensors      the broadcast copy, by tensor path: what a user wants
server.safetensors       master/<path> and outer/<leaf>/<path>
contributions/N.bin      accepted payloads that no round has merged yet
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import structlog
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from fragments.digest import digest_hex
from fragments.errors import PayloadError, RunDirectoryError
from fragments.layout import FragmentLayout, Layout
from fragments.payload import Payload
from fragments.records import ContributionKey
from fragments.runspec import RunSpec
from outer_server.core.state import RunState
from outer_server.core.step import FragmentParameters, outer_optimizer
from outer_server.store.files import sync_directory, sync_file, write_atomically

FORMAT = 1
DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    SafetensorError,
    PayloadError,
)
"""What reading a damaged snapshot may raise."""

KEPT = 3
"""Snapshots kept; older ones are removed once a newer one is in place."""

_log = structlog.get_logger(__name__)
_STATE: TypeAdapter[RunState] = TypeAdapter(RunState)
"""Numbers that are not finite (an unknown loss) are written as Python's json writes them: NaN."""

_KEYS: TypeAdapter[list[ContributionKey]] = TypeAdapter(list[ContributionKey])


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a server needs to go on. `fragments` are those of `state`'s versions."""

    state: RunState
    fragments: tuple[FragmentParameters, ...]
    payloads: Mapping[ContributionKey, Payload]


def save(directory: Path, layout: Layout, snapshot: Snapshot) -> Path:
    """Write `snapshot` under the next number; return its directory.

    Old ones are removed only when it is in place and its state can be read back.
    Raises RunDirectoryError, and leaves the old ones, when it cannot be written.
    """
    number = max([int(path.name) for path in numbered(directory)], default=-1) + 1
    target = directory / f"{number:06d}"
    draft = directory / f".{number:06d}.new"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        (draft / "contributions").mkdir(parents=True)
        _write(draft, layout, snapshot)
        draft.rename(target)
        sync_directory(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise RunDirectoryError(
            f"no snapshot can be written to {directory}: {error}; make room on the disk"
        ) from error
    for old in numbered(directory)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_newest(directory: Path, spec: RunSpec, layout: Layout) -> tuple[Snapshot, bool]:
    """The newest snapshot that is whole, and whether it is the newest written.

    Damaged ones are passed over, with a warning. Raises RunDirectoryError when
    there is none.
    """
    reasons: list[str] = []
    for path in reversed(numbered(directory)):
        try:
            return _read(path, spec, layout), not reasons
        except DAMAGE as error:
            reasons.append(f"{path.name}: {error}")
            _log.warning("snapshot_damaged", snapshot=path.name, reason=str(error))
    raise RunDirectoryError(f"{directory} has no usable snapshot: {'; '.join(reasons) or 'empty'}")


def numbered(directory: Path) -> list[Path]:
    """Finished snapshots, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.name.isdigit())


def _write(draft: Path, layout: Layout, snapshot: Snapshot) -> None:
    weights: dict[str, np.ndarray] = {}
    server: dict[str, np.ndarray] = {}
    for part, values in zip(layout.fragments, snapshot.fragments, strict=True):
        weights.update(_tensors(part, values.broadcast_BxN))
        server.update(_tensors(part, values.master_BxN, "master/"))
        for leaf, array in enumerate(jax.tree.leaves(values.outer)):
            name = f"outer/{part.index}/{leaf}"
            if array.shape == values.master_BxN.shape:
                server.update(_tensors(part, array, f"{name}/"))
            else:
                server[name] = np.asarray(array)
    save_file(weights, draft / "weights.safetensors", metadata={"format": "np"})
    save_file(server, draft / "server.safetensors", metadata={"format": "np"})
    keys = sorted(snapshot.payloads, key=lambda k: (k.fragment, k.learner, k.base_version))
    for number, key in enumerate(keys):
        (draft / "contributions" / f"{number}.bin").write_bytes(snapshot.payloads[key].data)
    (draft / "state.json").write_text(_state_json(snapshot.state))
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    for path in files:
        sync_file(path)
    manifest = {
        "format": FORMAT,
        "fragments": [{"version": f.version, "digest": f.digest} for f in snapshot.state.fragments],
        "contributions": [
            {"key": key, "codec": p.codec, "raw_size": p.raw_size, "crc32c": p.crc32c}
            for key, p in zip(
                json.loads(_KEYS.dump_json(keys)),
                (snapshot.payloads[key] for key in keys),
                strict=True,
            )
        ],
        "sha256": {str(path.relative_to(draft)): _sha256(path) for path in files},
    }
    write_atomically(draft / "manifest.json", json.dumps(manifest, indent=1).encode())
    sync_directory(draft / "contributions")


def _state_json(state: RunState) -> str:
    """The state without its settings, which stand in run.json.

    It is read back at once: ValueError now, rather than a snapshot that cannot
    be read when it is needed.
    """
    text = json.dumps(_STATE.dump_python(state, mode="json", exclude={"spec"}), indent=1)
    _state_from_json(text, state.spec)
    return text


def _state_from_json(text: str, spec: RunSpec) -> RunState:
    document = json.loads(text)
    return _STATE.validate_python(document | {"spec": spec})


def _read(path: Path, spec: RunSpec, layout: Layout) -> Snapshot:
    manifest = json.loads((path / "manifest.json").read_bytes())
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']} is not {FORMAT}")
    for name, checksum in manifest["sha256"].items():
        if _sha256(path / name) != checksum:
            raise ValueError(f"{name} does not match its checksum")
    try:
        state = _state_from_json((path / "state.json").read_text(), spec)
    except ValidationError as error:
        raise ValueError(f"state.json: {error}") from error
    fragments = _read_fragments(path, spec, layout)
    found = [digest_hex(fragment.broadcast_BxN) for fragment in fragments]
    if found != [fragment.digest for fragment in state.fragments]:
        raise ValueError("weights.safetensors does not have the digests of state.json")
    keys = _KEYS.validate_python([entry["key"] for entry in manifest["contributions"]])
    payloads = {
        key: Payload(
            entry["codec"],
            entry["raw_size"],
            entry["crc32c"],
            (path / "contributions" / f"{number}.bin").read_bytes(),
        )
        for number, (key, entry) in enumerate(zip(keys, manifest["contributions"], strict=True))
    }
    return Snapshot(state, fragments, payloads)


def _read_fragments(path: Path, spec: RunSpec, layout: Layout) -> tuple[FragmentParameters, ...]:
    weights = load_file(path / "weights.safetensors")
    server = load_file(path / "server.safetensors")
    optimizer = outer_optimizer(spec.outer)
    fragments = []
    for part in layout.fragments:
        master = _blocks(layout, part, server, "master/")
        leaves, structure = jax.tree.flatten(optimizer.init(jnp.asarray(master)))
        read: list[Any] = []
        for leaf, array in enumerate(leaves):
            name = f"outer/{part.index}/{leaf}"
            if array.shape == master.shape:
                read.append(jnp.asarray(_blocks(layout, part, server, f"{name}/")))
            else:
                read.append(jnp.asarray(server[name], array.dtype))
        fragments.append(
            FragmentParameters(
                jnp.asarray(master),
                jnp.asarray(_blocks(layout, part, weights, "")),
                jax.tree.unflatten(structure, read),
            )
        )
    return tuple(fragments)


def _tensors(part: FragmentLayout, blocks: Any, prefix: str = "") -> dict[str, np.ndarray]:
    """A fragment value as float32 tensors of the model's shapes, by prefixed path."""
    blocks_BxN = np.asarray(blocks)
    tensors = {}
    for slot in part.slots:
        flat = blocks_BxN[slot.row_start : slot.row_stop].reshape(-1)[: slot.size]
        tensors[prefix + slot.spec.path] = flat.reshape(slot.spec.shape).copy()
    return tensors


def _blocks(
    layout: Layout, part: FragmentLayout, tensors: Mapping[str, np.ndarray], prefix: str
) -> np.ndarray:
    """Undoes `_tensors`."""
    blocks_BxN = np.zeros((layout.rows_padded, layout.block), np.float32)
    for slot in part.slots:
        flat = blocks_BxN[slot.row_start : slot.row_stop].reshape(-1)
        flat[: slot.size] = tensors[prefix + slot.spec.path].reshape(-1)
    return blocks_BxN


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
