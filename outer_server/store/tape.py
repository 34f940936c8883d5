"""The tape: every event that changed the run's state, in order, as the scheduler was told it.

    tape.sqlite     one row an event: number, seconds since the server's start, wall time, what it
                    is, its fields as JSON, a CRC-32C; and where the payloads of contributions lie

From a snapshot and the events after it the scheduler comes to the same state again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, get_args

import google_crc32c
from pydantic import TypeAdapter, ValidationError

from fragments.disk import Disk
from fragments.errors import RunDirectoryError, StorageError
from outer_server.core.events import Event
from outer_server.store.payloads import Place

FORMAT = 1
"""Format of the tape; a server refuses another."""

_KINDS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(Event)}

_TABLES = """
CREATE TABLE event (
    number INTEGER PRIMARY KEY, at_s REAL, unix_s REAL, kind TEXT, body TEXT, crc32c INTEGER
);
CREATE TABLE payload (
    number INTEGER PRIMARY KEY, file INTEGER, start INTEGER, num_bytes INTEGER,
    codec TEXT, raw_size INTEGER, crc32c INTEGER
);
"""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a contribution's payload lies, and what its header said."""

    place: Place
    codec: str
    raw_size: int
    crc32c: int

    @property
    def header(self) -> tuple[str, int, int]:
        """All but the place."""
        return self.codec, self.raw_size, self.crc32c


@dataclass(frozen=True, slots=True)
class Entry:
    """An event on its way to the tape; it is numbered there."""

    at_s: float
    unix_s: float
    event: Event
    stored: Stored | None


@dataclass(frozen=True, slots=True)
class Record:
    """An event of the tape. `at_s` is the scheduler's time, `unix_s` for people."""

    number: int
    at_s: float
    unix_s: float
    event: Event
    stored: Stored | None


class DamagedTapeError(Exception):
    """The record that follows `last_whole` is not what was written; the message says how."""

    def __init__(self, last_whole: int, reason: str) -> None:
        super().__init__(reason)
        self.last_whole = last_whole


class Tape:
    """An open tape. One thread at a time may use it.

    The name of a new one is durable once its directory is synced.

    Raises RunDirectoryError for one that is of another format, or no tape at all, and StorageError
    when something cannot be written.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._is_durable = True
        try:
            self._database = disk.connect(path)
            found = self._format()
            if found == 0:  # Made just now, or by a server that lost power before it was done.
                self._make()
                found = self._format()
            if found != FORMAT:
                raise RunDirectoryError(
                    f"{path} has format {found}, this program knows {FORMAT}: use the matching "
                    "release"
                )
            self._last = self._find_last()
        except sqlite3.OperationalError as error:
            raise StorageError(f"{path} cannot be opened: {error}") from error
        except sqlite3.DatabaseError as error:
            raise RunDirectoryError(f"{path} is damaged: {error}") from error

    @property
    def last(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._last

    def write(
        self, entries: Sequence[Entry], *, durable: bool, trim: int | None = None
    ) -> int | None:
        """Add events, all or none; durable, with all before them, when this returns, or with the
        next that are. `trim`: remove the events up to this one.

        Returns, after a trim, the lowest payload file that is still named, or one above all. Raises
        StorageError; then nothing has changed.
        """
        rows, stored_rows = [], []
        for number, entry in enumerate(entries, self._last + 1):
            kind = type(entry.event).__name__
            fields = _KINDS[kind].dump_python(entry.event, mode="json")
            body = json.dumps(fields, separators=(",", ":"))
            crc = _checksum(number, entry.at_s, kind, body)
            rows.append((number, entry.at_s, entry.unix_s, kind, body, crc))
            if entry.stored is not None:
                stored_rows.append((number, *astuple(entry.stored.place), *entry.stored.header))
        last = self._last + len(rows)
        with self._transaction(durable=durable):
            self._database.executemany("INSERT INTO event VALUES (?, ?, ?, ?, ?, ?)", rows)
            self._database.executemany(
                "INSERT INTO payload VALUES (?, ?, ?, ?, ?, ?, ?)", stored_rows
            )
            if durable and not rows and trim is None:
                # A transaction that changes nothing would not be synced.
                self._database.execute(f"PRAGMA user_version = {FORMAT}")
            if trim is not None:
                # The newest stays, so that numbers go on where they were.
                until = min(trim, last - 1)
                self._database.execute("DELETE FROM event WHERE number <= ?", (until,))
                self._database.execute("DELETE FROM payload WHERE number <= ?", (until,))
        self._last = last
        return None if trim is None else self._lowest_file()

    def records(self, after: int) -> Iterator[Record]:
        """The events after number `after`, in order.

        Raises DamagedTapeError at the first that is missing or not what was written.
        """
        yield from records_after(self._database, after)

    def cut_after(self, number: int) -> dict[str, int]:
        """Remove, durably, all events after `number`; how many of each kind there were."""
        query = "SELECT kind, count(*) FROM event WHERE number > ? GROUP BY kind"
        kinds: dict[str, int] = {}
        with suppress(sqlite3.DatabaseError):  # where they cannot be counted they go all the same
            kinds = dict(self._database.execute(query, (number,)).fetchall())
        with self._transaction(durable=True):
            self._database.execute("DELETE FROM payload WHERE number > ?", (number,))
            self._database.execute("DELETE FROM event WHERE number > ?", (number,))
        self._last = number
        return kinds

    def copy_to(self, path: Path) -> bool:
        """Whether a copy could be made, which nothing relies on."""
        try:
            with closing(sqlite3.connect(path)) as copy:
                self._database.backup(copy)
        except (sqlite3.Error, OSError):
            return False
        return True

    def clear(self) -> None:
        """Remove all events, durably; the next has the number that it would have had."""
        last = self._last
        self.cut_after(0)
        self._last = last

    def close(self) -> None:
        """Use it no more."""
        self._database.close()

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[None]:
        """All that is done within, or nothing. Raises StorageError for a full or failing disk."""
        try:
            # Without FULL a commit writes the log and leaves its sync to the next with it.
            if durable is not self._is_durable:
                self._database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._is_durable = durable
            self._database.execute("BEGIN")
            yield
            self._disk.commit(self._database)
        except (sqlite3.DatabaseError, OSError) as error:
            with suppress(sqlite3.DatabaseError):
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
            raise StorageError(
                f"the server cannot write its journal ({error}): training goes on, and "
                "contributions are taken again once there is room on its disk"
            ) from error

    def _format(self) -> int:
        return int(self._database.execute("PRAGMA user_version").fetchone()[0])

    def _make(self) -> None:
        with self._transaction(durable=True):
            for statement in _TABLES.strip().split(";\n"):
                self._database.execute(statement.strip().rstrip(";"))
            self._database.execute(f"PRAGMA user_version = {FORMAT}")

    def _lowest_file(self) -> int:
        (file,) = self._database.execute("SELECT min(file) FROM payload").fetchone()
        return 1 << 62 if file is None else int(file)

    def _find_last(self) -> int:
        (last,) = self._database.execute("SELECT max(number) FROM event").fetchone()
        return last or 0


def records_after(database: sqlite3.Connection, after: int) -> Iterator[Record]:
    """The events of an open tape after number `after`, in order. Raises as `Tape.records`."""
    expected = after + 1
    try:
        for row in database.execute(f"{_SELECT} ORDER BY e.number", (after,)):
            yield _record(row, expected)
            expected += 1
    except sqlite3.DatabaseError as error:
        raise DamagedTapeError(expected - 1, f"event {expected} cannot be read") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedTapeError(expected - 1, f"event {expected}: {error}") from error


def whole_from(database: sqlite3.Connection, after: int) -> int | None:
    """The number from which on all events up to the newest are whole, above `after`; None where the
    newest is not, or there is none.
    """
    lowest: int | None = None
    with suppress(sqlite3.DatabaseError, ValueError, KeyError, TypeError):
        for row in database.execute(f"{_SELECT} ORDER BY e.number DESC", (after,)):
            lowest = _record(row, row[0] if lowest is None else lowest - 1).number
    return lowest


_SELECT = (
    "SELECT e.number, at_s, unix_s, kind, body, e.crc32c, file, start, num_bytes, codec, raw_size, "
    "p.crc32c FROM event e LEFT JOIN payload p ON p.number = e.number WHERE e.number > ?"
)


def _record(row: tuple[Any, ...], expected: int) -> Record:
    number, at_s, unix_s, kind, body, crc = row[:6]
    if number != expected:
        raise ValueError("it is missing")
    if crc != _checksum(number, at_s, kind, body):
        raise ValueError("it does not match its checksum")
    try:
        event = _KINDS[kind].validate_python(json.loads(body))
    except ValidationError as error:
        raise ValueError(str(error)) from error
    stored = None
    if row[6] is not None:
        file, start, num_bytes, codec, raw_size, payload_crc = row[6:]
        stored = Stored(Place(file, start, num_bytes), codec, raw_size, payload_crc)
    return Record(number, at_s, unix_s, event, stored)


def _checksum(number: int, at_s: float, kind: str, body: str) -> int:
    return int(google_crc32c.value(f"{number}|{at_s!r}|{kind}|{body}".encode()))
