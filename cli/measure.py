"""What the verbs that measure share: where they write, how they are stopped, JSON or text."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field

from cli.keys import VerbSettings
from cli.stop import STOP_WITHIN_S, stop_on_signal

Result = TypeVar("Result", bound=BaseModel)

Bench = Callable[[Path, threading.Event, Callable[[str], None]], Result]
"""Takes a directory to write in, what stops it, and what takes its lines; raises StoppedError."""


class MeasureSettings(VerbSettings):
    """How the result is shown, and what is kept of the run."""

    json_: bool = Field(default=False, alias="json", description="print the result as JSON")
    out: Path | None = Field(
        default=None, description="keep run directories and logs there (default: nothing is kept)"
    )


def measure(
    settings: MeasureSettings,
    bench: Bench[Result],
    show: Callable[[Result], None],
    stop_within_s: float = STOP_WITHIN_S,
) -> Result:
    """What `bench` measures, writing where the settings say. It is printed, as JSON or by `show`.

    Raises:
        RunDirectoryError: when `out` holds something that is no earlier run of ours.
        KeyboardInterrupt: when it was stopped, for which it has `stop_within_s`.
    """
    from harness.outdir import prepare

    scratches = tempfile.TemporaryDirectory(prefix="diloco-bench-")
    with stop_on_signal(within_s=stop_within_s) as stop, scratches as scratch:
        from harness.cluster import StoppedError

        if settings.out is not None:
            prepare(settings.out)
        place = settings.out or Path(scratch)
        try:
            result = bench(place, stop, lambda line: print(line, file=sys.stderr))
        except StoppedError:
            if settings.out is not None:
                print(f"stopped; what there is by now is in {settings.out}", file=sys.stderr)
            # It was not all measured, so whoever waits for that must not go on.
            raise KeyboardInterrupt from None
    if settings.json_:
        print(result.model_dump_json(indent=2))
    else:
        show(result)
    return result
