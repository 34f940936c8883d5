"""The file layer under everything that a server or a learner keeps: what is written is durable when
the call that says so returns, and at no other time. Passed in, so that a test can lose power.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import sqlite3
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

_PAGE_BYTES = 4096
_DIRECT_BYTES = 1 << 18
"""A write of so many bytes in whole pages passes by the system's cache, so many at a time."""


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

    Whole pages of a large write pass by the system's cache, where the file system can do that: a
    snapshot of gigabytes that nobody will read soon would push everything else out of it, and
    copying it there, page by page, cost the server a seventh of its processor time in `diloco
    bench`. What is left of such a write before and behind its whole pages goes through the cache,
    so no page is ever written in both ways.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._offset = 0
        self._direct: _Direct | None = None
        self._may_be_direct = hasattr(os, "O_DIRECT")

    def write(self, data: bytes | memoryview) -> None:
        """See `DiskFile`."""
        rest = memoryview(data).cast("B")
        head = -self._offset % _PAGE_BYTES
        whole = (len(rest) - head) // _PAGE_BYTES * _PAGE_BYTES
        if whole < _DIRECT_BYTES or not self._may_be_direct:
            self._write_cached(rest)
            return
        self._write_cached(rest[:head])
        written = self._write_direct(rest[head : head + whole])
        self._write_cached(rest[head + written :])

    def seek(self, offset: int) -> None:
        """See `DiskFile`."""
        self._offset = offset

    def sync(self) -> None:
        """See `DiskFile`."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """See `DiskFile`."""
        if self._direct is not None:
            self._direct.close()
            self._direct = None
        self._file.close()

    def _write_cached(self, rest: memoryview) -> None:
        while rest:
            written = os.pwrite(self._file.fileno(), rest, self._offset)
            self._offset += written
            rest = rest[written:]

    def _write_direct(self, pages: memoryview) -> int:
        """Write pages past the cache; how many bytes were, all but where it turns out that this
        cannot be done here.
        """
        if self._direct is None:
            try:
                self._direct = _Direct(self._file.fileno())
            except OSError:
                self._may_be_direct = False
                return 0
        written = 0
        try:
            while written < len(pages):
                part = pages[written : written + _DIRECT_BYTES]
                num_bytes = self._direct.write(part, self._offset)
                self._offset += num_bytes
                written += num_bytes
                if num_bytes % _PAGE_BYTES:
                    # There was room for no more: the cached write of the rest will say so.
                    break
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._may_be_direct = False
        return written

    def __enter__(self) -> RealFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Direct:
    """Another way into an open file, past the system's cache. Raises OSError where there is none,
    EINVAL where that shows when it is used.
    """

    def __init__(self, descriptor: int) -> None:
        # By its descriptor: the name may be another file's by now.
        path = f"/proc/self/fd/{descriptor}"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._room = mmap.mmap(-1, _DIRECT_BYTES)  # begins with a page, as such a write must

    def write(self, pages: memoryview, offset: int) -> int:
        """Write at most _DIRECT_BYTES; how many were."""
        self._room[: len(pages)] = pages
        with memoryview(self._room) as room, room[: len(pages)] as part:
            return os.pwrite(self._descriptor, part, offset)

    def close(self) -> None:
        """Use it no more."""
        os.close(self._descriptor)
        self._room.close()


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
