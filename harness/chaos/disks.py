"""A file layer over another one: what does as that does, but for what is to go wrong."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Self

from fragments.disk import Disk, DiskFile


class DiskOver:
    """A `Disk` that does as `disk` does."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def open(self, path: Path) -> DiskFile:
        """See `Disk`."""
        return self._disk.open(path)

    def make_directory(self, path: Path) -> None:
        """See `Disk`."""
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
        """See `Disk`."""
        self._disk.commit(database)


class FileOver:
    """A `DiskFile` that does as `file` does."""

    def __init__(self, file: DiskFile) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        """See `DiskFile`."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
