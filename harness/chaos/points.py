"""Named points of a server at which it can be made to kill itself.

What a point is, is told by the file layer that the server writes through: before and after each
kind of durable write. A trap is set from outside, by a file, and springs once.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fragments.disk import REAL_DISK, Disk, DiskFile
from harness.chaos.disks import DiskOver, FileOver


class Deed(StrEnum):
    """What a server does to its run directory, or says."""

    PAYLOAD_WRITE = "payload write"
    PAYLOAD_SYNC = "payload sync"
    PAYLOAD_DIRECTORY = "payload directory sync"
    TAPE_COMMIT = "tape commit"
    SNAPSHOT_WRITE = "snapshot write"
    SNAPSHOT_SYNC = "snapshot file sync"
    SNAPSHOT_MANIFEST = "snapshot manifest rename"
    SNAPSHOT_CONTENTS = "snapshot contents sync"
    SNAPSHOT_RENAME = "snapshot rename"
    SNAPSHOT_DIRECTORY = "snapshot directory sync"
    RECORD_SYNC = "server.json sync"
    RECORD_RENAME = "server.json rename"
    RECORD_DIRECTORY = "server.json directory sync"
    ACKNOWLEDGE = "acknowledge"


AT_START = frozenset(
    {Deed.PAYLOAD_DIRECTORY, Deed.RECORD_SYNC, Deed.RECORD_RENAME, Deed.RECORD_DIRECTORY}
)
"""What a server does as it starts, or with its first contribution, and hardly later."""


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """Before or after a deed. Between applying a contribution and saying so is before ACKNOWLEDGE;
    in mid-snapshot is before or after a SNAPSHOT_WRITE.
    """

    deed: Deed
    is_after: bool

    def __str__(self) -> str:
        return f"{'after' if self.is_after else 'before'} {self.deed}"


POINTS = tuple(
    Point(deed, is_after)
    for deed in Deed
    for is_after in (False, True)
    # After it is said, nothing of it is left to be done.
    if not (deed is Deed.ACKNOWLEDGE and is_after)
)


class Trap:
    """A file that names a point and how often it is still to be passed; from either side.

    The server that passes it for the last time takes the file away and is gone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._passed: Counter[str] = Counter()

    def set(self, point: Point, times: int) -> None:
        """Spring when `point` is passed for the `times`-th time from now."""
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({"point": str(point), "times": times}), encoding="utf-8")
        part.replace(self._path)

    def clear(self) -> None:
        """Do not spring."""
        self._path.unlink(missing_ok=True)

    @property
    def is_set(self) -> bool:
        """It has not sprung yet."""
        return self._path.exists()

    def pass_by(self, point: Point) -> None:
        """Called by the server at each point, from any thread; does not return where it springs."""
        try:
            order = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        name = str(point)
        if order["point"] != name:
            return
        with self._lock:
            self._passed[name] += 1
            if self._passed[name] < order["times"]:
                return
            self._path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def around(self, deed: Deed | None) -> Iterator[None]:
        """Passes the points before and after what is done within; None is no deed."""
        if deed is not None:
            self.pass_by(Point(deed, is_after=False))
        yield
        if deed is not None:
            self.pass_by(Point(deed, is_after=True))


class TrappedDisk(DiskOver):
    """A `Disk` on which a trap may spring. `run_dir`: the run directory that is written to."""

    def __init__(self, trap: Trap, run_dir: Path, disk: Disk = REAL_DISK) -> None:
        self._trap = trap
        super().__init__(disk)
        self._run_dir = run_dir

    def open(self, path: Path) -> DiskFile:
        """See `Disk`."""
        file = self._disk.open(path)
        return _TrappedFile(self._trap, file, *self._deeds_on(path))

    def rename(self, old: Path, new: Path) -> None:
        """See `Disk`."""
        deed = None
        if new.parent == self._run_dir / "snapshots":
            deed = Deed.SNAPSHOT_RENAME
        elif new.name == "manifest.json":
            deed = Deed.SNAPSHOT_MANIFEST
        elif new.name == "server.json":
            deed = Deed.RECORD_RENAME
        with self._trap.around(deed):
            self._disk.rename(old, new)

    def sync_directory(self, path: Path) -> None:
        """See `Disk`."""
        deed = None
        if path == self._run_dir:
            deed = Deed.RECORD_DIRECTORY
        elif path == self._run_dir / "snapshots":
            deed = Deed.SNAPSHOT_DIRECTORY
        elif self._run_dir / "snapshots" in path.parents:
            deed = Deed.SNAPSHOT_CONTENTS
        elif path.name == "payloads":
            deed = Deed.PAYLOAD_DIRECTORY
        with self._trap.around(deed):
            self._disk.sync_directory(path)

    def commit(self, database: sqlite3.Connection) -> None:
        """See `Disk`."""
        with self._trap.around(Deed.TAPE_COMMIT):
            self._disk.commit(database)

    def _deeds_on(self, path: Path) -> tuple[Deed | None, Deed | None]:
        """What it is to write to a file, and to sync it."""
        if path.parent.name == "payloads":
            return Deed.PAYLOAD_WRITE, Deed.PAYLOAD_SYNC
        if self._run_dir / "snapshots" in path.parents:
            return Deed.SNAPSHOT_WRITE, Deed.SNAPSHOT_SYNC
        if path.name == ".server.json.new":
            return None, Deed.RECORD_SYNC
        return None, None


class _TrappedFile(FileOver):
    """A `DiskFile` on which a trap may spring."""

    def __init__(
        self, trap: Trap, file: DiskFile, on_write: Deed | None, on_sync: Deed | None
    ) -> None:
        super().__init__(file)
        self._trap = trap
        self._on_write = on_write
        self._on_sync = on_sync

    def write(self, data: bytes | memoryview) -> None:
        """See `DiskFile`."""
        with self._trap.around(self._on_write):
            self._file.write(data)

    def sync(self) -> None:
        """See `DiskFile`."""
        with self._trap.around(self._on_sync):
            self._file.sync()
