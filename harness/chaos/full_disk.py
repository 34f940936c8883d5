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

from fragments.disk import REAL_DISK, Disk, DiskFile
from harness.chaos.disks import DiskOver, FileOver


class FillableDisk(DiskOver):
    """A `Disk` that is full while the file `flag`, which lies elsewhere, exists."""

    def __init__(self, flag: Path, disk: Disk = REAL_DISK) -> None:
        super().__init__(disk)
        self._flag = flag

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

    def commit(self, database: sqlite3.Connection) -> None:
        """See `Disk`. sqlite's own words, where its log finds no room."""
        if self.is_full:
            raise sqlite3.OperationalError("database or disk is full")
        self._disk.commit(database)


class _FillableFile(FileOver):
    """A `DiskFile` on it."""

    def __init__(self, disk: FillableDisk, path: Path, file: DiskFile) -> None:
        super().__init__(file)
        self._disk = disk
        self._path = path

    def write(self, data: bytes | memoryview) -> None:
        """See `DiskFile`."""
        if self._disk.is_full:
            self._file.write(data[: len(data) // 2])
            self._disk.require_room(self._path)
        self._file.write(data)
