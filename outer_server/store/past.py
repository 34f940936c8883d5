"""A journal as it lies on the disk, to be read: nothing of it or beside it is changed.

Sqlite takes over a log that a killed process has left as soon as it opens a database to be written,
and then nothing tells any more what was damaged in it. So a tape that nobody writes is copied, with
its log, and the copy is read.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from fragments.disk import REAL_DISK
from fragments.errors import RunDirectoryError
from fragments.payload import Payload
from outer_server.store.journal import TAPE, is_missing, lost_events, payload_of
from outer_server.store.lock import InUseError, lock_to_read
from outer_server.store.payloads import PayloadFiles
from outer_server.store.tape import FORMAT, DamagedTapeError, Record, records_after, whole_from


class Past:
    """The journal of a run directory, which may be served meanwhile; close it.

    `damage`: why events may be missing at its end that were there, "" otherwise. `first`, `last`:
    numbers of the oldest and the newest event; 0 without any.

    Raises RunDirectoryError where there is none, or nothing of it can be read.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "journal" / TAPE
        if is_missing(self.path.parent):
            raise RunDirectoryError(f"{self.path} is missing or empty: put it back from a copy")
        self._copy: TemporaryDirectory[str] | None = None
        self._files = PayloadFiles(REAL_DISK, self.path.parent / "payloads")
        self.damage = ""
        try:
            self._database = self._open(run)
            (found,) = self._database.execute("PRAGMA user_version").fetchone()
            if found not in (0, FORMAT):  # 0: by a server that was killed before it was made.
                raise RunDirectoryError(
                    f"{self.path} has format {found}, this program knows {FORMAT}: use the"
                    " matching release"
                )
            self.first, self.last = self._ends() if found else (0, 0)
        except sqlite3.DatabaseError as error:
            self.close()
            raise RunDirectoryError(f"nothing of {self.path} can be read: {error}") from error
        except BaseException:
            self.close()
            raise

    def records(self, after: int) -> Iterator[Record]:
        """The events after number `after`, in order. Raises DamagedTapeError at the first that is
        missing or not what was written, and at the end where others may have followed.
        """
        if after > self.last:
            raise DamagedTapeError(after, f"it ends at event {self.last}")
        yield from records_after(self._database, after)
        if self.damage:
            raise DamagedTapeError(self.last, self.damage)

    def payload(self, record: Record) -> Payload | None:
        """What a contribution brought. Raises DamagedTapeError where that is not what was written,
        and OSError where it cannot be read for the moment.
        """
        return None if record.stored is None else payload_of(self._files, record, record.stored)

    def whole_again(self, after: int) -> int | None:
        """The number from which on all events up to the newest can be read, above `after`; None
        where the newest cannot.
        """
        return whole_from(self._database, after)

    def close(self) -> None:
        """Use it no more."""
        if hasattr(self, "_database"):
            self._database.close()
        if self._copy is not None:
            self._copy.cleanup()

    def _open(self, run: Path) -> sqlite3.Connection:
        try:
            lock = lock_to_read(run)
        except InUseError:
            return _connect(self.path)  # Its server mends what is to be mended, and holds its log.
        try:
            self._copy = TemporaryDirectory(prefix="diloco-")
            log = self.path.with_name(f"{TAPE}-wal")
            self.damage = lost_events(self.path.parent)
            for file in filter(Path.exists, (self.path, log)):
                shutil.copyfile(file, Path(self._copy.name, file.name))
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} cannot be copied, to be read, to {error.filename}: {error.strerror}"
            ) from error
        finally:
            if lock is not None:
                lock.close()
        return sqlite3.connect(Path(self._copy.name, TAPE), isolation_level=None)

    def _ends(self) -> tuple[int, int]:
        query = "SELECT min(number), max(number) FROM event"
        first, last = self._database.execute(query).fetchone()
        return first or 0, last or 0


def _connect(path: Path) -> sqlite3.Connection:
    """A database that another process writes, to be read."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
