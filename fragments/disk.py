"""The file layer under everything that a server or a learner keeps: what is written is durable when
the call that says so returns, and at no other time. Passed in, so that a test can lose power.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable


@runtime_checkable
class DiskFile(Protocol):
    """A file that is being written; a context manager that closes it. Raises OSError."""

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes at the present place."""

    def seek(self, offset: int) -> None:
        """Go on at this byte."""

    def sync(self) -> None:
        """Make all that was written durable."""

    def close(self) -> None:
        """Write no more."""

    def __enter__(self) -> DiskFile: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


@runtime_checkable
class Disk(Protocol):
    """Every change that is made to a run directory. Raises OSError; thread-safe.

    A name that was made, changed or removed is durable once its directory is synced, what a file
    holds once the file is.
    """

    def open(self, path: Path) -> DiskFile:
        """A file to be written, made new or emptied."""

    def make_directory(self, path: Path) -> None:
        """Make a directory, and those above it that are missing."""

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or directory another name; a file of that name is replaced."""

    def remove(self, path: Path) -> None:
        """Remove a file, or a directory with all in it; nothing there is no error."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""

    def identity(self, path: Path) -> int:
        """A number that this file keeps for life, also under another name, and no copy has."""

    def connect(self, path: Path) -> sqlite3.Connection:
        """Open or make a database, whose transactions are durable when `commit` returns."""

    def commit(self, database: sqlite3.Connection) -> None:
        """Make the open transaction durable. Raises sqlite3.Error."""


class RealFile:
    """A `DiskFile` of the operating system. It holds nothing back: what finds no room is refused
    when it is written, and nothing is left to be written when the file is closed.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        """See `DiskFile`."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self._file.write(rest) :]

    def seek(self, offset: int) -> None:
        """See `DiskFile`."""
        self._file.seek(offset)

    def sync(self) -> None:
        """See `DiskFile`."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """See `DiskFile`."""
        self._file.close()

    def __enter__(self) -> RealFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class RealDisk:
    """A `Disk` of the operating system."""

    def open(self, path: Path) -> RealFile:
        """See `Disk`."""
        return RealFile(path.open("wb", buffering=0))

    def make_directory(self, path: Path) -> None:
        """See `Disk`."""
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        """See `Disk`."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """See `Disk`."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def identity(self, path: Path) -> int:
        """See `Disk`."""
        return path.stat().st_ino

    def connect(self, path: Path) -> sqlite3.Connection:
        """See `Disk`."""
        return connect(path)

    def commit(self, database: sqlite3.Connection) -> None:
        """See `Disk`."""
        database.execute("COMMIT")


REAL_DISK = RealDisk()


def connect(path: Path) -> sqlite3.Connection:
    """A database with a write-ahead log that is synced at every commit, used by one thread at a
    time; transactions are begun and ended by name.
    """
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    return database


def write_atomically(disk: Disk, path: Path, data: bytes) -> None:
    """Replace `path` by `data`, durably, whole or not at all: synced file, rename, synced
    directory.
    """
    draft = path.with_name(f".{path.name}.new")
    with disk.open(draft) as file:
        file.write(data)
        file.sync()
    disk.rename(draft, path)
    disk.sync_directory(path.parent)
