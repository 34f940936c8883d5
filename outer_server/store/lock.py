"""Who may use a run directory: one server, or any number of programs that only read it.

    lock            held by the one or shared by the others; never removed
    address.json    where the server that holds it listens; `diloco serve` writes it

Where no lock can be made, nobody can serve from there either: a reader needs none then.
"""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path
from typing import IO

from fragments.errors import RunDirectoryError

ADDRESS = "address.json"
"""While a server runs: where it listens, and its process."""

READERS_S = 10.0
"""A server waits so long for those who only read: a tape is copied meanwhile."""

_LOOK_S = 0.1

_WEIGHTS = (
    "the newest weights on disk: weights.safetensors of its newest snapshot, which `diloco "
    "snapshot` renews"
)


class InUseError(RunDirectoryError):
    """A run directory that somebody else has; the message says who."""


def lock_to_serve(run: Path) -> IO[bytes]:
    """Have a run directory for oneself until what is returned is closed.

    Raises InUseError, and RunDirectoryError where it cannot be written.
    """
    try:
        lock = (run / "lock").open("ab")
    except OSError as error:
        raise RunDirectoryError(
            f"{run} cannot be written ({error.strerror}), and a server keeps its journal there: see"
            " to its rights and its disk, or serve a copy of it with --take-over (`diloco events`,"
            " `replay` and `export` only read)"
        ) from error
    until_s = time.monotonic() + READERS_S
    while not _flock(lock, fcntl.LOCK_EX):
        if not _is_read(run) or time.monotonic() >= until_s:
            lock.close()
            raise _in_use(run)
        time.sleep(_LOOK_S)
    return lock


def lock_to_read(run: Path) -> IO[bytes] | None:
    """Keep servers off a run directory until what is returned is closed; None where none has ever
    been started. Nothing is written. Raises InUseError where one is served from it, and
    RunDirectoryError where that cannot be found out.
    """
    try:
        lock = (run / "lock").open("rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(
            f"{run / 'lock'} cannot be read: {error.strerror}; see to its rights"
        ) from error
    if not _flock(lock, fcntl.LOCK_SH):
        lock.close()
        raise _in_use(run)
    return lock


def check_unused(run: Path) -> None:
    """Raises InUseError where somebody has the directory at this moment; changes nothing."""
    try:
        lock = (run / "lock").open("rb")
    except OSError:
        return  # Nobody has it, or whoever wants to serve it hears why that cannot be.
    with lock:
        # Shared, so that it keeps nobody off in its turn, and needs no right to write.
        if not _flock(lock, fcntl.LOCK_SH):
            raise _in_use(run)


def _flock(lock: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunDirectoryError(f"{lock.name} cannot be locked: {error.strerror}") from error
    return True


def _in_use(run: Path) -> InUseError:
    if _is_read(run):
        readers = "`diloco replay`, `diloco events` or `diloco export`"
        return InUseError(f"{run} is in use by {readers}: wait for it")
    return InUseError(f"{run} is in use by a server{_place(run)}: stop that one first ({_WEIGHTS})")


def _is_read(run: Path) -> bool:
    """Whether those who have it only read it."""
    try:
        with (run / "lock").open("rb") as lock:
            return _flock(lock, fcntl.LOCK_SH)
    except OSError:
        return False


def _place(run: Path) -> str:
    """Where the server is that has it, as far as it has said so yet."""
    try:
        said = json.loads((run / ADDRESS).read_bytes())
        return f" at {said['address']} (process {int(said['pid'])})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
