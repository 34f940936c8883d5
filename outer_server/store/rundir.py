"""A run directory: what `diloco init` writes and one server at a time owns.

    run.json        format, spec           written once
    layout.json     which tensor is where  written once
    server.json     generation, epoch, clean, and after a clean stop the name of its snapshot:
                    rewritten at each start and clean stop
    lock            held while a server runs
    snapshots/      see outer_server.store.snapshot

Readable without this program: JSON and safetensors.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
from jaxtyping import Float32
from pydantic import ValidationError

from fragments.errors import LayoutError, RunDirectoryError
from fragments.layout import Layout
from fragments.runspec import RunSpec
from outer_server.core.state import new_state
from outer_server.parameters import Parameters
from outer_server.store.files import sync_directory, write_atomically
from outer_server.store.snapshot import Restored, Snapshot, load_newest, numbered, save
from outer_server.store.unwritten import Unwritten

FORMAT = 1
"""Format of the directory; a server refuses a newer one."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a server goes on from, and how that relates to the one before it.

    `generation` is larger than at any earlier start. `epoch` is that of the
    snapshot after an orderly stop; otherwise, since versions that were published
    may be missing from the snapshot, it is larger than any that was ever served.
    """

    generation: int
    epoch: int
    snapshot: Restored


def create_run(
    path: Path,
    spec: RunSpec,
    layout: Layout,
    values: Sequence[Float32[np.ndarray, "B N"]],
) -> None:
    """Write a new run: settings, layout, and version 0 of each fragment.

    `values`: one fragment value each, float32 (rows_padded, block). All or
    nothing: a directory that exists is refused, a failed attempt leaves none.

    Raises RunDirectoryError when `path` exists and is not empty, NonFiniteError
    when a weight is not finite.
    """
    if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
        raise RunDirectoryError(f"{path} exists already: name another directory or remove it")
    parameters = Parameters.newborn(spec, layout, values)
    state = new_state(spec, parameters.digests(), generation=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        (draft / "snapshots").mkdir(parents=True)
        document = {"format": FORMAT, "spec": json.loads(spec.model_dump_json())}
        write_atomically(draft / "run.json", json.dumps(document, indent=2).encode())
        write_atomically(draft / "layout.json", layout.to_json().encode())
        first = Snapshot(state, Unwritten(parameters.fragments), {})
        written = save(draft / "snapshots", layout, first)
        write_atomically(draft / "server.json", _server_json(0, state.epoch, written.name))
        if path.is_dir():
            path.rmdir()
        draft.rename(path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class RunDirectory:
    """An opened run directory, held by one process at a time; use as a context manager.

    Raises RunDirectoryError when it is missing, damaged, of a newer format or in use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec, self.layout = read_run(path)
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> RunDirectory:
        lock = (self.path / "lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise RunDirectoryError(
                f"{self.path} is in use by another server: stop that one first"
            ) from None
        self._lock = lock
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def start(self) -> Start:
        """Load the newest whole snapshot; raise the generation, and where needed the epoch,
        durably, before anything is served.
        """
        snapshot = load_newest(self.path / "snapshots", self.spec, self.layout)
        record = _read_json(self.path / "server.json")
        generation, epoch, clean = (record.get(key) for key in ("generation", "epoch", "clean"))
        if not (isinstance(generation, int) and isinstance(epoch, int) and isinstance(clean, bool)):
            raise RunDirectoryError(f"{self.path / 'server.json'} is damaged")
        # One that was there at a clean stop may have been removed since; run directories of
        # earlier programs do not name it.
        newest = numbered(self.path / "snapshots")[-1].name
        is_last = snapshot.is_newest and record.get("snapshot", newest) == newest
        if not (clean and is_last and epoch == snapshot.state.epoch):
            epoch = max(epoch, snapshot.state.epoch) + 1
        generation += 1
        write_atomically(self.path / "server.json", _server_json(generation, epoch, None))
        return Start(generation, epoch, snapshot)

    def stopped(self, generation: int, epoch: int) -> None:
        """Note, after the last snapshot, that nothing was left unsaved."""
        newest = numbered(self.path / "snapshots")[-1].name
        write_atomically(self.path / "server.json", _server_json(generation, epoch, newest))

    def save(self, snapshot: Snapshot) -> None:
        """Write a snapshot, atomically, and drop old ones."""
        save(self.path / "snapshots", self.layout, snapshot)


def read_run(path: Path) -> tuple[RunSpec, Layout]:
    """Settings and layout of a run directory; holds no lock. Raises RunDirectoryError."""
    if not (path / "run.json").is_file():
        raise RunDirectoryError(f"{path} is not a run directory: make one with `diloco init`")
    document = _read_json(path / "run.json")
    found = document.get("format")
    if found != FORMAT:
        raise RunDirectoryError(
            f"{path} has format {found!r}, this program knows {FORMAT}: use the matching release"
        )
    try:
        spec = RunSpec.model_validate(document.get("spec"))
        layout = Layout.from_json((path / "layout.json").read_text())
    except (ValidationError, LayoutError, OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    return spec, layout


def _server_json(generation: int, epoch: int, snapshot: str | None) -> bytes:
    """`snapshot`: the one that a clean stop has left; None while a server runs."""
    record = {"generation": generation, "epoch": epoch, "clean": snapshot is not None}
    return json.dumps(record | ({} if snapshot is None else {"snapshot": snapshot})).encode()


def _read_json(path: Path) -> dict[str, object]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise RunDirectoryError(f"{path} is damaged: not a JSON object")
    return document
