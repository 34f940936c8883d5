"""What the verbs that measure share: where they write, how they are stopped, JSON or text."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from cli.keys import VerbSettings
from cli.stop import stop_on_signal

Result = TypeVar("Result")

Bench = Callable[[Path, threading.Event, Callable[[str], None]], Result]
"""Takes a directory to write in, what stops it, and what takes its lines; raises StoppedError."""


class MeasureSettings(VerbSettings):
    """How the result is shown, and what is kept of the run."""

    json_: bool = Field(default=False, alias="json", description="print the result as JSON")
    out: Path | None = Field(
        default=None, description="keep run directories and logs there (default: nothing is kept)"
    )


def measure(out: Path | None, bench: Bench[Result]) -> Result | None:
    """What `bench` measures, writing in `out` or where nothing is kept; None where it was stopped.

    Raises:
        RunDirectoryError: when `out` holds something that is no earlier run of ours.
    """
    from harness.outdir import prepare

    with stop_on_signal() as stop, tempfile.TemporaryDirectory(prefix="diloco-bench-") as scratch:
        from harness.cluster import StoppedError

        if out is not None:
            prepare(out)
        try:
            return bench(out or Path(scratch), stop, lambda line: print(line, file=sys.stderr))
        except StoppedError:
            print("stopped before the end", file=sys.stderr)
            return None
