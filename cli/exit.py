"""Exit codes of the command, and the one place that turns an error into a sentence and a code.

| code | meaning |
|---|---|
| 0 | done, or stopped cleanly by SIGINT or SIGTERM with the state kept |
| 1 | anything else that is not right; a traceback means a bug of this program |
| 2 | usage, settings, data or checkpoint: change the command or the file that it names |
| 3 | the outer server cannot be reached |
| 4 | the outer server refuses this process, or what it asks for |
| 5 | the run directory is missing, damaged, in use, or of another version |
| 130 | stopped by SIGINT or SIGTERM before it was done, as a shell says it |
"""

from __future__ import annotations

from fragments.errors import (
    CheckpointError,
    DataError,
    DilocoError,
    ForbiddenError,
    LayoutError,
    RefusedError,
    RunDirectoryError,
    SettingsError,
    UnreachableError,
)

OK = 0
OTHER = 1
USAGE = 2
UNREACHABLE = 3
REFUSED = 4
RUN_DIRECTORY = 5
STOPPED = 130

_CODES: tuple[tuple[type[DilocoError], int], ...] = (
    (SettingsError, USAGE),
    (DataError, USAGE),
    (CheckpointError, USAGE),
    (LayoutError, USAGE),
    (UnreachableError, UNREACHABLE),
    (RefusedError, REFUSED),
    (ForbiddenError, REFUSED),
    (RunDirectoryError, RUN_DIRECTORY),
)


def exit_code(error: DilocoError) -> int:
    """The code of the table above for a domain error; 1 for one that it does not list."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return OTHER


def sentence(error: BaseException) -> str:
    """The error as one line for stderr."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"diloco: {where}{error.strerror}"
    text = " ".join(str(error).split())
    return f"diloco: {text or type(error).__name__}"
