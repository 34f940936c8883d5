"""The journal: the tape and the payload files together, as the engine uses them.

    journal/tape.sqlite     see outer_server.store.tape
    journal/payloads/       see outer_server.store.payloads

What is older than the oldest snapshot that is kept leaves, so that the disk is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Protocol

import structlog

from fragments.disk import Disk
from fragments.errors import RunDirectoryError
from fragments.payload import Payload
from outer_server.store.payloads import FILE_BYTES, PayloadFiles
from outer_server.store.tape import DamagedTapeError, Entry, Record, Stored, Tape
from outer_server.store.wal import has_hole

TAPE = "tape.sqlite"

_log = structlog.get_logger(__name__)


def lost_events(directory: Path) -> str:
    """Why events are missing that were there, as their log tells before anybody opens the tape: "",
    or a sentence. Afterwards nothing does, for sqlite goes on before a hole as if nothing had been
    after it.
    """
    if has_hole(directory / f"{TAPE}-wal"):
        return "events follow on one that is not what was written"
    return ""


def is_missing(directory: Path) -> bool:
    """Whether nothing is left of the tape, or an empty file, whose log sqlite would remove."""
    tape = directory / TAPE
    return not tape.exists() or tape.stat().st_size == 0


def _suffixes() -> Iterator[str]:
    yield ""
    yield from (f".{number}" for number in count(2))


class Journal(Protocol):
    """What the engine writes. `kept` is for any thread, all else for one at a time."""

    @property
    def position(self) -> int | None:
        """Number of the newest event; None where none are kept."""

    @property
    def trouble(self) -> str:
        """Why the newest contribution could not be stored, in a sentence; "" if it could, or if
        that is long ago.
        """

    def kept(self, payload: Payload) -> AbstractContextManager[Stored | None]:
        """Store a contribution's bytes, durably; they stay while this context lasts, and beyond
        where an event names them by then. Raises StorageError.
        """

    def write(self, entries: Sequence[Entry], *, durable: bool, trim: int | None = None) -> None:
        """Add events, all or none; durable, with all before them, when this returns, or with the
        next that are. `trim`: let go of the events up to this one and of their payloads.

        Raises StorageError; then nothing has changed.
        """

    def close(self) -> None:
        """Use it no more."""


class NoJournal:
    """Keeps nothing: an unclean stop goes back to the newest snapshot."""

    position: int | None = None
    trouble: str = ""

    def kept(self, payload: Payload) -> AbstractContextManager[Stored | None]:
        """See `Journal`."""
        return nullcontext()

    def write(self, entries: Sequence[Entry], *, durable: bool, trim: int | None = None) -> None:
        """See `Journal`."""

    def close(self) -> None:
        """See `Journal`."""


class DurableJournal:
    """A `Journal` in a directory, which is made if it is missing. With `mend` a tape that cannot be
    read at all is set aside. `damage`: why events may be missing that were there, "" otherwise.

    Raises RunDirectoryError for one of another format, StorageError when it cannot be opened.
    """

    def __init__(
        self, disk: Disk, directory: Path, file_bytes: int = FILE_BYTES, *, mend: bool = False
    ) -> None:
        payloads = directory / "payloads"
        disk.make_directory(payloads)
        self.damage = ""
        self._directory = directory
        self._disk = disk
        self._tape = self._open(mend=mend)
        # The name of the directory itself is synced with server.json, before anything is served.
        disk.sync_directory(directory)
        self._files = PayloadFiles(disk, payloads, file_bytes)

    @property
    def position(self) -> int:
        """See `Journal`."""
        return self._tape.last

    @property
    def trouble(self) -> str:
        """See `Journal`."""
        return self._files.trouble

    @contextmanager
    def kept(self, payload: Payload) -> Iterator[Stored]:
        """See `Journal`."""
        with self._files.kept(payload.data) as place:
            yield Stored(place, payload.codec, payload.raw_size, payload.crc32c)

    def write(self, entries: Sequence[Entry], *, durable: bool, trim: int | None = None) -> None:
        """See `Journal`."""
        lowest = self._tape.write(entries, durable=durable, trim=trim)
        if lowest is not None:
            self._files.drop_before(lowest)

    def close(self) -> None:
        """See `Journal`."""
        self._files.close()
        self._tape.close()

    def records(self, after: int) -> Iterator[tuple[Record, Payload | None]]:
        """The events after number `after` with the payloads that they brought.

        Raises DamagedTapeError at the first that is not what was written, and OSError where a
        payload cannot be read for the moment.
        """
        if after > self._tape.last:
            raise DamagedTapeError(
                after, f"it ends at event {self._tape.last}, and the snapshot is of event {after}"
            )
        for record in self._tape.records(after):
            yield (
                record,
                None if record.stored is None else payload_of(self._files, record, record.stored),
            )

    def cut_after(self, number: int) -> tuple[dict[str, int], str]:
        """Remove all events after `number`, durably: how many of each kind there were, and where a
        copy of the tape as it was is, for people, beside those of earlier cuts; "" where none could
        be made, or nothing was on it.
        """
        kept = ""
        if self._tape.last:
            names = (f"{TAPE}.before-cut{suffix}" for suffix in _suffixes())
            copy = next(p for name in names if not (p := self._directory / name).exists())
            kept = str(copy) if self._tape.copy_to(copy) else ""
        return self._tape.cut_after(number), kept

    def clear(self) -> None:
        """Remove all events, durably; the next has the number that it would have had."""
        self._tape.clear()

    def _open(self, *, mend: bool) -> Tape:
        path = self._directory / TAPE
        try:
            return Tape(self._disk, path)
        except RunDirectoryError as error:
            if not mend or "format" in str(error):
                raise
            self.damage = str(error)
        for name in (TAPE, f"{TAPE}-wal", f"{TAPE}-shm"):
            if (self._directory / name).exists():
                self._disk.rename(self._directory / name, self._directory / f"{name}.damaged")
        _log.warning("tape_set_aside", tape=f"{path}.damaged", reason=self.damage)
        return Tape(self._disk, path)


def payload_of(files: PayloadFiles, record: Record, stored: Stored) -> Payload:
    """What a contribution brought. Raises DamagedTapeError where that is not what was written."""
    # Anything else that keeps it from being read (rights, a disk that fails) may be over soon,
    # and is no reason to do without what it holds.
    try:
        data = files.read(stored.place)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DamagedTapeError(record.number - 1, f"a payload is missing: {error}") from error
    payload = Payload(stored.codec, stored.raw_size, stored.crc32c, data)
    if len(data) != stored.place.num_bytes or not payload.is_whole:
        reason = f"the payload of event {record.number} does not match its checksum"
        raise DamagedTapeError(record.number - 1, reason)
    return payload
