"""The directory of a local run: made anew, an earlier run in it being put aside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fragments.errors import RunDirectoryError

_MARKER = "diloco-run.json"


def prepare(out: Path) -> Path | None:
    """Makes `out` an empty directory and returns where its former content went, if it had any.

    Only the directory of an earlier local run is put aside, as `<out>.previous`; the one before
    that goes.

    Raises:
        RunDirectoryError: when `out` holds something else, or cannot be made.
    """
    previous = None
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            previous = _put_aside(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / _MARKER).write_text(json.dumps({"made_by": "diloco run"}) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {out}: {error.strerror}") from error
    return previous


def _put_aside(out: Path) -> Path:
    if not (out / _MARKER).is_file():
        raise RunDirectoryError(
            f"{out} is not empty and is no earlier local run: give another --out"
        )
    previous = out.with_name(out.name + ".previous")
    if previous.exists():
        if not (previous / _MARKER).is_file():
            raise RunDirectoryError(f"{previous} is in the way and is no earlier local run")
        shutil.rmtree(previous)
    out.rename(previous)
    return previous
