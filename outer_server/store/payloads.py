"""The bytes of contributions, one after another in files of some MiB.

    payloads/000001.bin ...   nothing but payloads; where each lies, the tape says

A file is never added to after a restart: what a crash left at its end is in nobody's way.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from fragments.disk import Disk, DiskFile
from fragments.errors import StorageError

FILE_BYTES = 16 << 20
"""A new file is begun once one has this many bytes."""

TROUBLE_S = 300.0
"""How long it is told that a payload could not be stored, if nobody brings another."""


_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies: which file, from which byte, how many."""

    file: int
    start: int
    num_bytes: int


class _Segment:
    """A file that is being added to. `synced`: how many of its bytes are durable. `is_broken`: no
    more will be.
    """

    def __init__(self, number: int, file: DiskFile) -> None:
        self.number = number
        self.file = file
        self.end = 0
        self.synced = 0
        self.is_broken = False

    @property
    def needs_sync(self) -> bool:
        """Whether somebody waits for what is in it, or will."""
        return not self.is_broken and self.synced < self.end


class PayloadFiles:
    """Payloads on disk. Thread-safe: whoever puts one waits until it is durable, and those who wait
    at the same time share one sync.
    """

    # `_lock` guards what is added to which file, for as long as a write takes; `_sync_lock`, which
    # is taken before it where both are, what is durable and who closes, for as long as a sync does.

    def __init__(self, disk: Disk, directory: Path, file_bytes: int = FILE_BYTES) -> None:
        self._disk = disk
        self._directory = directory
        self._file_bytes = file_bytes
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._current: _Segment | None = None
        self._retired: list[_Segment] = []
        self._is_closed = False
        self._next = max(_numbers(directory), default=0) + 1
        self._pinned: Counter[int] = Counter()
        self._trouble = ""
        self._trouble_at_s = 0.0

    @property
    def trouble(self) -> str:
        """Why the last payload could not be stored, in a sentence; "" if it could, or if that was
        longer than TROUBLE_S ago.
        """
        is_recent = time.monotonic() - self._trouble_at_s <= TROUBLE_S
        return self._trouble if is_recent else ""

    @contextmanager
    def kept(self, data: bytes) -> Iterator[Place]:
        """Write a payload, durably; its file stays for as long as this context and beyond, where
        the tape names it by then. Raises StorageError where it could not be stored, or after
        `close`.
        """
        segment, place = self._put(data)
        try:
            self._sync(segment, place.start + place.num_bytes)
            if self._trouble:
                _log.info("contributions_are_stored_again")
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
        """Add no more; what was added but is not durable is lost."""
        with self._lock:
            self._is_closed = True
            self._retire()
        with self._sync_lock:
            for segment in self._take_retired():
                self._close(segment)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:06d}.bin"

    def _put(self, data: bytes) -> tuple[_Segment, Place]:
        """Write a payload, not durably yet, and hold its file. Raises StorageError."""
        try:
            with self._lock:
                segment = self._segment()
                place = Place(segment.number, segment.end, len(data))
                try:
                    segment.file.write(data)
                except OSError:
                    segment.is_broken = True
                    self._retire()
                    raise
                segment.end += len(data)
                self._pinned[segment.number] += 1
        except OSError as error:
            # Or a full disk would come to have a file, open and empty, for each that it refused.
            self._tidy()
            raise self._failed(error) from error
        return segment, place

    def _segment(self) -> _Segment:
        """The file to add to; under the lock. Raises OSError, StorageError after `close`."""
        if self._is_closed:
            raise StorageError("the server is stopping: send it anew when it is back")
        if self._current is not None and self._current.end >= self._file_bytes:
            self._retire()
        if self._current is None:
            self._current = self._begin()
        return self._current

    def _begin(self) -> _Segment:
        number, self._next = self._next, self._next + 1
        path = self._path(number)
        file = self._disk.open(path)
        try:
            self._disk.sync_directory(self._directory)
        except OSError:
            with suppress(OSError):
                file.close()
            with suppress(OSError):
                self._disk.remove(path)
            raise
        return _Segment(number, file)

    def _retire(self) -> None:
        """Add to another from here on; under the lock."""
        if self._current is not None:
            self._retired.append(self._current)
            self._current = None

    def _sync(self, segment: _Segment, until: int) -> None:
        """Make the segment durable up to a byte; who comes second finds it done."""
        try:
            with self._sync_lock:
                if segment.synced >= until:
                    return
                if segment.is_broken:
                    raise StorageError("the disk of the server failed: send it anew")
                end = segment.end
                try:
                    segment.file.sync()
                except OSError as error:
                    # What a failed sync has dropped, the next would not write: never trust it.
                    segment.is_broken = True
                    with self._lock:
                        if self._current is segment:
                            self._retire()
                    raise self._failed(error) from error
                segment.synced = end
        finally:
            if self._retired:
                self._tidy()

    def _tidy(self) -> None:
        """Close those that nobody adds to any more, once nobody waits for what is in them."""
        with self._sync_lock:
            for segment in self._take_retired():
                if segment.needs_sync:
                    with self._lock:
                        self._retired.append(segment)
                else:
                    self._close(segment)

    def _take_retired(self) -> list[_Segment]:
        with self._lock:
            retired, self._retired = self._retired, []
        return retired

    def _close(self, segment: _Segment) -> None:
        segment.is_broken = True
        with suppress(OSError):
            segment.file.close()
        if segment.synced == 0:
            with suppress(OSError):
                self._disk.remove(self._path(segment.number))

    def _failed(self, error: OSError) -> StorageError:
        if not self._trouble:
            _log.error("contribution_not_stored", reason=str(error))
        self._trouble, self._trouble_at_s = _sentence(error), time.monotonic()
        return StorageError(self._trouble)


def _numbers(directory: Path) -> list[int]:
    return [int(path.stem) for path in directory.glob("*.bin") if path.stem.isdigit()]


def _sentence(error: OSError) -> str:
    return (
        f"the server cannot store contributions ({error.strerror or error}): training goes on, and "
        "they are taken again once there is room on its disk"
    )
