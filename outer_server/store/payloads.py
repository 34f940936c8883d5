"""The bytes of contributions, one after another in files of some MiB.

    payloads/000001.bin ...   nothing but payloads; where each lies, the tape says

A file is never added to after a restart: what a crash left at its end is in nobody's way.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fragments.disk import Disk, DiskFile
from fragments.errors import StorageError

FILE_BYTES = 16 << 20
"""A new file is begun once one has this many bytes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies: which file, from which byte, how many."""

    file: int
    start: int
    num_bytes: int


class _Segment:
    """A file that is being added to. `synced`: how many of its bytes are durable. `is_broken`: no
    more will be. `is_retired`: nobody adds to it any more.
    """

    def __init__(self, number: int, file: DiskFile) -> None:
        self.number = number
        self.file = file
        self.end = 0
        self.synced = 0
        self.is_broken = False
        self.is_retired = False

    def close_if_done(self) -> None:
        """Once nobody needs it; whoever calls holds the lock of those who sync."""
        if self.is_retired and (self.is_broken or self.synced == self.end):
            self.file.close()


class PayloadFiles:
    """Payloads on disk. Thread-safe: whoever puts one waits until it is durable, and those who wait
    at the same time share one sync.
    """

    def __init__(self, disk: Disk, directory: Path, file_bytes: int = FILE_BYTES) -> None:
        self._disk = disk
        self._directory = directory
        self._file_bytes = file_bytes
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._current: _Segment | None = None
        self._next = max(_numbers(directory), default=0) + 1
        self._pinned: Counter[int] = Counter()
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """Why the last payload could not be stored, in a sentence; "" if it could."""
        return self._trouble

    @contextmanager
    def kept(self, data: bytes) -> Iterator[Place]:
        """Write a payload, durably; its file stays for as long as this context and beyond, where
        the tape names it by then. Raises StorageError.
        """
        try:
            with self._lock:
                segment = self._segment()
                place = Place(segment.number, segment.end, len(data))
                try:
                    segment.file.write(data)
                except OSError:
                    segment.is_broken = True
                    raise
                segment.end += len(data)
                self._pinned[segment.number] += 1
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._sync(segment, place.start + place.num_bytes)
            self._trouble = ""
            yield place
        finally:
            with self._lock:
                self._pinned[segment.number] -= 1

    def read(self, place: Place) -> bytes:
        """The bytes there, fewer where the file is shorter. Raises OSError."""
        with self._path(place.file).open("rb") as file:
            file.seek(place.start)
            return file.read(place.num_bytes)

    def drop_before(self, number: int) -> None:
        """Remove files below `number` that nobody adds to or holds."""
        with self._lock:
            pinned = {each for each, holders in self._pinned.items() if holders > 0}
            self._pinned = Counter({each: self._pinned[each] for each in pinned})
            current = self._current.number if self._current is not None else self._next
            old = [each for each in _numbers(self._directory) if each < min(number, current)]
        for each in old:
            if each not in pinned:
                self._disk.remove(self._path(each))

    def close(self) -> None:
        """Add no more."""
        with self._lock:
            if self._current is not None:
                self._current.file.close()
                self._current = None

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:06d}.bin"

    def _segment(self) -> _Segment:
        segment = self._current
        if segment is not None and (segment.is_broken or segment.end >= self._file_bytes):
            self._retire(segment)
        if self._current is None:
            number, self._next = self._next, self._next + 1
            file = self._disk.open(self._path(number))
            self._disk.sync_directory(self._directory)
            self._current = _Segment(number, file)
        return self._current

    def _retire(self, segment: _Segment) -> None:
        """Add to another from here on."""
        self._current = None
        with self._sync_lock:
            segment.is_retired = True
            segment.close_if_done()
            is_useless = segment.is_broken and segment.synced == 0
        if is_useless:
            # Or a full disk would come to have one for each that it refused.
            self._disk.remove(self._path(segment.number))

    def _sync(self, segment: _Segment, until: int) -> None:
        """Make the segment durable up to a byte; who comes second finds it done."""
        with self._sync_lock:
            if segment.synced >= until:
                return
            if segment.is_broken:
                raise StorageError("the disk of the server failed: send it anew")
            end = segment.end
            try:
                segment.file.sync()
            except OSError as error:
                # What a failed sync has dropped, the next one would not write: never trust it.
                segment.is_broken = True
                raise self._failed(error) from error
            else:
                segment.synced = end
            finally:
                segment.close_if_done()

    def _failed(self, error: OSError) -> StorageError:
        self._trouble = _sentence(error)
        return StorageError(self._trouble)


def _numbers(directory: Path) -> list[int]:
    return [int(path.stem) for path in directory.glob("*.bin") if path.stem.isdigit()]


def _sentence(error: OSError) -> str:
    return (
        f"the server cannot store contributions ({error.strerror or error}): training goes on, and "
        "they are taken again once there is room on its disk"
    )
