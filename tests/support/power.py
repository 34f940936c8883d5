"""A disk that remembers everything done to it, and what of that a power cut leaves.

What was written is durable once its file is synced, a name once its directory is, a transaction
once it was committed with a synced log. Everything else a cut may keep, lose or tear: `image` makes
the directory that is found afterwards, for any moment and each kind of bad luck.
"""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

from fragments.disk import DiskFile, RealDisk

FULL = 2
"""`PRAGMA synchronous` under which a commit syncs the log."""

LOG = "-wal"


class Luck(Enum):
    """What a cut does to that which is not durable."""

    ALL_LOST = "lost"
    NAMES_KEPT = "names without what was written"
    CONTENTS_KEPT = "what was written without the names"
    LAST_TORN = "all kept, half of the last write"
    ALL_KEPT = "kept"


@dataclass(frozen=True)
class Op:
    """One thing that was done: `what`, to `path`, and what belongs to it."""

    what: str
    path: Path = Path()
    data: Any = None
    site: str = ""


@dataclass
class _File:
    volatile: bytes = b""
    durable: bytes = b""


@dataclass
class _Database:
    """(database, log) as they lie on the disk; None before the first commit."""

    volatile: tuple[bytes, bytes] | None = None
    durable: tuple[bytes, bytes] | None = None


@dataclass
class _Directory:
    volatile: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)


_Node = _File | _Database | _Directory


class _WatchedFile:
    def __init__(self, disk: RecordingDisk, path: Path, file: DiskFile) -> None:
        self._disk, self._path, self._file = disk, path, file
        self._place = 0

    def write(self, data: bytes | memoryview) -> None:
        with self._disk.lock:
            self._file.write(data)
            self._disk.note(Op("write", self._path, (self, self._place, bytes(data))))
            self._place += len(data)

    def seek(self, offset: int) -> None:
        self._file.seek(offset)
        self._place = offset

    def sync(self) -> None:
        with self._disk.lock:
            self._file.sync()
            self._disk.note(Op("sync", self._path, self, _site()))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _WatchedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RecordingDisk(RealDisk):
    """A real disk whose changes are noted in order, under one lock. `root` is where all lies."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ops: list[Op] = []
        self.lock = threading.RLock()
        self._databases: dict[int, Path] = {}

    def note(self, op: Op) -> None:
        with self.lock:
            self.ops.append(op)

    def mark(self, what: Any) -> None:
        """Somebody outside has heard of `what` by now."""
        self.note(Op("mark", data=what))

    def open(self, path: Path) -> Any:
        with self.lock:
            file = _WatchedFile(self, path, super().open(path))
            self.note(Op("create", path, file))
        return file

    def make_directory(self, path: Path) -> None:
        with self.lock:
            missing = [each for each in (path, *path.parents) if not each.exists()]
            super().make_directory(path)
            for each in reversed(missing):
                self.note(Op("mkdir", each))

    def rename(self, old: Path, new: Path) -> None:
        with self.lock:
            super().rename(old, new)
            self.note(Op("rename", old, new))

    def remove(self, path: Path) -> None:
        with self.lock:
            super().remove(path)
            self.note(Op("remove", path))

    def sync_directory(self, path: Path) -> None:
        with self.lock:
            super().sync_directory(path)
            self.note(Op("syncdir", path, site=_site()))

    def identity(self, path: Path) -> int:
        return 1

    def connect(self, path: Path) -> sqlite3.Connection:
        with self.lock:
            is_new = not path.exists()
            database = super().connect(path)
            self._databases[id(database)] = path
            if is_new:
                self.note(Op("connect", path))
        return database

    def commit(self, database: sqlite3.Connection) -> None:
        with self.lock:
            (level,) = database.execute("PRAGMA synchronous").fetchone()
            super().commit(database)
            path = self._databases[id(database)]
            log = path.with_name(path.name + LOG)
            files = (path.read_bytes(), log.read_bytes() if log.exists() else b"")
            site = _site() if level >= FULL else ""
            self.note(Op("commit", path, files, site))


_COMMON = frozenset({"disk.py", "tensors.py"})
"""What writes for others: the sync of a file is as many syncs as there are files."""


def _site() -> str:
    """Where the code stands that called the disk, and for whom."""
    frame: FrameType | None = sys._getframe(2)
    places = []
    while frame is not None:
        name = Path(frame.f_code.co_filename).name
        places.append(f"{name}:{frame.f_lineno}")
        if name not in _COMMON:
            break
        frame = frame.f_back
    return " for ".join(places)


class Tracker:
    """The state of the disk after so many operations, durable and volatile.

    Args:
        root: where the recorded disk was.
        ignored: syncs at this site do nothing, as if they stood in no program.
    """

    def __init__(self, root: Path, ignored: str = "") -> None:
        self._root = root
        self._ignored = ignored
        self._top = _Directory()
        self._files: dict[int, _File] = {}
        self._last_write: tuple[_File, int] | None = None
        self._last_commit: tuple[_Database, tuple[bytes, bytes] | None] | None = None
        self._changes = 0

    def apply(self, op: Op) -> None:
        self._last_write = self._last_commit = None
        match op.what:
            case "create":
                self._files[id(op.data)] = self._put(op.path, _File())
            case "write":
                handle, place, data = op.data
                file = self._files[id(handle)]
                padded = file.volatile.ljust(place, b"\0")
                file.volatile = padded[:place] + data + padded[place + len(data) :]
                self._last_write = (file, place + len(data) // 2)
            case "sync" if op.site != self._ignored:
                file = self._files[id(op.data)]
                file.durable = file.volatile
            case "mkdir":
                self._put(op.path, _Directory())
            case "connect":
                self._put(op.path, _Database())
            case "commit":
                database = self._at(op.path)
                assert isinstance(database, _Database)
                self._last_commit = (database, database.volatile)
                database.volatile = op.data
                if op.site and op.site != self._ignored:
                    database.durable = op.data
            case "rename":
                self._put(op.data, self._directory(op.path).volatile.pop(op.path.name))
            case "remove":
                self._directory(op.path).volatile.pop(op.path.name, None)
            case "syncdir" if op.site != self._ignored:
                directory = self._at(op.path)
                assert isinstance(directory, _Directory)
                directory.durable = dict(directory.volatile)

    def image(self, luck: Luck) -> dict[str, bytes | None]:
        """What is found after a cut now: files by their path below the root; None: a directory."""
        return dict(self._found(self._top, "", luck))

    def _found(
        self, directory: _Directory, prefix: str, luck: Luck
    ) -> Iterator[tuple[str, bytes | None]]:
        names_kept = luck in (Luck.NAMES_KEPT, Luck.LAST_TORN, Luck.ALL_KEPT)
        kept = luck in (Luck.CONTENTS_KEPT, Luck.LAST_TORN, Luck.ALL_KEPT)
        entries = directory.volatile if names_kept else directory.durable
        for name, node in sorted(entries.items()):
            path = f"{prefix}{name}"
            if isinstance(node, _Directory):
                yield path, None
                yield from self._found(node, f"{path}/", luck)
            elif isinstance(node, _File):
                data = node.volatile if kept else node.durable
                if luck is Luck.LAST_TORN and self._last_write and self._last_write[0] is node:
                    data = data[: self._last_write[1]]
                yield path, data
            else:
                files = node.volatile if kept else node.durable
                if luck is Luck.LAST_TORN and self._last_commit and self._last_commit[0] is node:
                    files = _torn(self._last_commit[1], files)
                yield path, b"" if files is None else files[0]
                if files is not None and files[1]:
                    yield path + LOG, files[1]

    def _put(self, path: Path, node: Any) -> Any:
        self._directory(path).volatile[path.name] = node
        return node

    def _directory(self, path: Path) -> _Directory:
        directory = self._at(path.parent)
        assert isinstance(directory, _Directory)
        return directory

    def _at(self, path: Path) -> _Node:
        node: _Node = self._top
        for name in path.relative_to(self._root).parts:
            assert isinstance(node, _Directory)
            node = node.volatile[name]
        return node


def _torn(
    before: tuple[bytes, bytes] | None, after: tuple[bytes, bytes] | None
) -> tuple[bytes, bytes] | None:
    """The log with half of what a commit changed in it."""
    if before is None or after is None or before[0] != after[0]:
        return before
    old, new = before[1], after[1]
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(old))
    half = same + (len(new) - same) // 2
    return after[0], new[:half] + old[half:]


def write_image(image: dict[str, bytes | None], to: Path) -> None:
    """Make the directory that is found."""
    to.mkdir(parents=True)
    for name, data in image.items():
        if data is None:
            (to / name).mkdir()
        else:
            (to / name).write_bytes(data)


def sites(ops: Sequence[Op]) -> list[str]:
    """All places in the code that made something durable."""
    return sorted({op.site for op in ops if op.site})
