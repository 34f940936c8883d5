"""A disk that is full for as long as a file says so: what takes room fails as it does on one.

Nothing of the operating system's can be filled without being root, so the answers are given in
the file layer that the server writes through. Of bytes that are written, half still find room, as
on a disk that fills up; what only changes names, and what is read, goes on.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from types import TracebackType

from fragments.disk import REAL_DISK, Disk, DiskFile


class FillableDisk:
    """A `Disk` that is full while the file `flag`, which lies elsewhere, exists."""

    def __init__(self, flag: Path, disk: Disk = REAL_DISK) -> None:
        self._flag = flag
        self._disk = disk

    @property
    def is_full(self) -> bool:
        """Now."""
        return self._flag.exists()

    def require_room(self, path: Path) -> None:
        """Raises OSError (ENOSPC) while it is full."""
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def open(self, path: Path) -> DiskFile:
        """See `Disk`. A name takes room in its directory."""
        self.require_room(path)
        return _FillableFile(self, path, self._disk.open(path))

    def make_directory(self, path: Path) -> None:
        """See `Disk`."""
        if not path.is_dir():
            self.require_room(path)
        self._disk.make_directory(path)

    def rename(self, old: Path, new: Path) -> None:
        """See `Disk`."""
        self._disk.rename(old, new)

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        self._disk.remove(path)

    def sync_directory(self, path: Path) -> None:
        """See `Disk`."""
        self._disk.sync_directory(path)

    def identity(self, path: Path) -> int:
        """See `Disk`."""
        return self._disk.identity(path)

    def connect(self, path: Path) -> sqlite3.Connection:
        """See `Disk`."""
        return self._disk.connect(path)

    def commit(self, database: sqlite3.Connection) -> None:
        """See `Disk`. sqlite's own words, where its log finds no room."""
        if self.is_full:
            raise sqlite3.OperationalError("database or disk is full")
        self._disk.commit(database)


class _FillableFile:
    """A `DiskFile` on it."""

    def __init__(self, disk: FillableDisk, path: Path, file: DiskFile) -> None:
        self._disk = disk
        self._path = path
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        """See `DiskFile`."""
        if self._disk.is_full:
            self._file.write(data[: len(data) // 2])
            self._disk.require_room(self._path)
        self._file.write(data)

    def seek(self, offset: int) -> None:
        """See `DiskFile`."""
        self._file.seek(offset)

    def sync(self) -> None:
        """See `DiskFile`."""
        self._file.sync()

    def close(self) -> None:
        """See `DiskFile`."""
        self._file.close()

    def __enter__(self) -> _FillableFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
