"""A run directory: what `diloco init` writes and one server at a time owns.

    run.json        format, spec           written once
    layout.json     which tensor is where  written once
    server.json     `ServerRecord`: rewritten at each start and clean stop
    lock            held while a server runs
    snapshots/      see outer_server.store.snapshot
    journal/        see outer_server.store.journal

Readable without this program: JSON and safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
from jaxtyping import Float32
from pydantic import TypeAdapter, ValidationError

from fragments.disk import REAL_DISK, Disk, write_atomically
from fragments.errors import LayoutError, RunDirectoryError
from fragments.layout import Layout
from fragments.runspec import RunSpec
from fragments.sealed import SEAL, seal, unseal
from outer_server.core.state import Rollback, new_state
from outer_server.parameters import Parameters
from outer_server.store.lock import lock_to_read, lock_to_serve
from outer_server.store.snapshot import (
    KEPT,
    Known,
    Restored,
    Saved,
    Snapshot,
    known,
    load,
    load_newest,
    oldest_position,
    save,
)
from outer_server.store.unwritten import Unwritten

FORMAT = 1
"""Format of the directory; a server refuses a newer one."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """What `server.json` says: of the last server that ran here, or that none has yet.

    `clean`: it has stopped in order, and `snapshot` names what it left. `has_journal`: whatever it
    acknowledged or published is on the tape. `place` tells a directory from a copy of it; None
    before the first start. `epoch_begun`: the newest that may have begun since, by a rollback.
    `lost`: why the next server must begin an epoch, "" where it need not.
    """

    generation: int
    epoch: int
    clean: bool
    snapshot: str | None = None
    has_journal: bool = False
    place: int | None = None
    epoch_begun: int = 0
    lost: str = ""


def create_run(
    path: Path,
    spec: RunSpec,
    layout: Layout,
    values: Sequence[Float32[np.ndarray, "B N"]],
    disk: Disk = REAL_DISK,
) -> None:
    """Write a new run: settings, layout, and version 0 of each fragment.

    `values`: one fragment value each, float32 (rows_padded, block). All or
    nothing: a directory that exists is refused, a failed attempt leaves none.

    Raises RunDirectoryError when `path` exists and is not empty or its disk takes no run,
    NonFiniteError when a weight is not finite.
    """
    if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
        raise RunDirectoryError(f"{path} exists already: name another directory or remove it")
    parameters = Parameters.newborn(spec, layout, values)
    state = new_state(spec, parameters.digests(), generation=0)
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        disk.make_directory(path.parent)
        disk.make_directory(draft / "snapshots")
        document = {"format": FORMAT, "spec": json.loads(spec.model_dump_json())}
        write_atomically(disk, draft / "run.json", seal(document))
        write_atomically(disk, draft / "layout.json", layout.to_json().encode())
        first = Snapshot(state, Unwritten(parameters.fragments), {}, position=0)
        written = save(disk, draft / "snapshots", layout, first)
        record = ServerRecord(0, state.epoch, clean=True, snapshot=written.name)
        write_atomically(disk, draft / "server.json", _to_json(record))
        if path.is_dir():
            path.rmdir()
        disk.rename(draft, path)
        disk.sync_directory(path.parent)
    except OSError as error:
        raise RunDirectoryError(
            f"no run can be made at {path}: {error.strerror or error}"
        ) from error
    finally:
        disk.remove(draft)


_RECORD = TypeAdapter(ServerRecord)


class RunDirectory:
    """An opened run directory, held by one process at a time; use as a context manager.

    `keep_snapshots`: so many of the newest stay, and the journal reaches back to the oldest.
    `only_reads`: it keeps servers away and other readers not, and changes nothing.
    Raises RunDirectoryError when it is missing, damaged, of a newer format or in use.
    """

    def __init__(
        self,
        path: Path,
        disk: Disk = REAL_DISK,
        keep_snapshots: int = KEPT,
        *,
        only_reads: bool = False,
    ) -> None:
        self.path = path
        self._only_reads = only_reads
        self._keep_snapshots = keep_snapshots
        self.disk = disk
        self.spec, self.layout = read_run(path)
        self._lock: IO[bytes] | None = None
        self._rollbacks: tuple[Rollback, ...] = ()

    def __enter__(self) -> RunDirectory:
        self._lock = (lock_to_read if self._only_reads else lock_to_serve)(self.path)
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

    @property
    def snapshots(self) -> Path:
        """Where they are: see outer_server.store.snapshot."""
        return self.path / "snapshots"

    @property
    def journal(self) -> Path:
        """Where it is: see outer_server.store.journal."""
        return self.path / "journal"

    @property
    def place(self) -> int:
        """A number that a copy of this directory does not have."""
        return self.disk.identity(self.path / "lock")

    def record(self, remedy: str = "") -> ServerRecord:
        """What the last server has noted. Raises RunDirectoryError, with `remedy` where it is
        damaged or gone.
        """
        path = self.path / "server.json"
        found = _read_json(path, remedy)
        try:
            return _RECORD.validate_python(found)
        except ValidationError as error:
            raise RunDirectoryError(f"{path} is damaged: {error}{remedy}") from error

    def write_record(self, record: ServerRecord) -> None:
        """Note what the next server must know, durably."""
        write_atomically(self.disk, self.path / "server.json", _to_json(record))

    def load(self) -> Restored:
        """The newest whole snapshot. Raises RunDirectoryError where there is none."""
        return load_newest(self.snapshots, self.spec, self.layout)

    def save(self, snapshot: Snapshot) -> Saved:
        """Write a snapshot, atomically, and drop old ones that nothing needs.

        Raises RunDirectoryError.
        """
        path = save(
            self.disk,
            self.snapshots,
            self.layout,
            snapshot,
            self._rollbacks,
            self._keep_snapshots,
        )
        return Saved(path.name, oldest_position(self.snapshots))

    def known(self) -> list[Known]:
        """The snapshots whose state can be read, oldest first."""
        return known(self.snapshots, self.spec)

    def load_named(self, name: str) -> Restored:
        """The snapshot of that name. Raises RunDirectoryError where it is missing or damaged."""
        return load(self.snapshots / name, self.spec, self.layout)

    def prepare_rollback(self, rollback: Rollback) -> Restored:
        """Note, durably, that its epoch may begin, and keep its snapshot, which is returned, for as
        long as a tape may go back to it. Not while a snapshot is written. Raises RunDirectoryError.
        """
        self._rollbacks = (*self._rollbacks, rollback)
        record = self.record()
        epoch = max(record.epoch_begun, rollback.epoch)
        self.write_record(replace(record, epoch_begun=epoch))
        return self.load_named(rollback.snapshot)

    def forget_rollback(self, rollback: Rollback) -> None:
        """It was not done: its snapshot need not stay. Not while a snapshot is written."""
        self._rollbacks = tuple(each for each in self._rollbacks if each != rollback)


def read_run(path: Path) -> tuple[RunSpec, Layout]:
    """Settings and layout of a run directory; holds no lock. Raises RunDirectoryError."""
    if not (path / "run.json").is_file():
        raise RunDirectoryError(f"{path} is not a run directory: make one with `diloco init`")
    document = _read_json(path / "run.json", remedy=_FROM_A_COPY)
    found = document.get("format")
    if found != FORMAT:
        raise RunDirectoryError(
            f"{path} has format {found!r}, this program knows {FORMAT}: use the matching release"
        )
    try:
        spec = RunSpec.model_validate(document.get("spec"))
        layout = Layout.from_json(_read(path / "layout.json", _FROM_A_COPY).decode())
    except (ValidationError, LayoutError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}{_FROM_A_COPY}") from error
    return spec, layout


_FROM_A_COPY = "; put the file back from a backup, or a copy of the run directory"


def _to_json(record: ServerRecord) -> bytes:
    return seal(asdict(record))


def _read_json(path: Path, remedy: str) -> dict[str, object]:
    """A file that was sealed, or was written before files were."""
    data = _read(path, remedy)
    try:
        document = json.loads(data)
        return unseal(data) if SEAL in document else dict(document)
    except (ValueError, TypeError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}{remedy}") from error


def _read(path: Path, remedy: str) -> bytes:
    """Raises RunDirectoryError: for a file that is gone with the remedy; what is there and cannot
    be read for the moment needs none.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error.strerror}{remedy}") from error
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be read: {error.strerror}; see to its disk and rights"
        ) from error
