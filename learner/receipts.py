"""What a server has acknowledged, as its learner knows it: a file that lies with the learner.

    {"learner": "eu-west", "fragment": 1, "epoch": 1, "version": 7, "crc32c": 2774912030,
     "num_bytes": 5120, "late": false, "duplicate": false, "pid": 4242, "unix_s": 1780000000.25}

One line a receipt. Who audits a run compares it with the server's journal: whatever stands here,
the journal must have.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from fragments.errors import SettingsError
from fragments.records import Contribution, Receipt

OnReceipt = Callable[[Contribution, Receipt], None]

_log = structlog.get_logger(__name__)


@contextmanager
def receipts_in(path: Path | None) -> Iterator[OnReceipt]:
    """What adds lines to `path`, which one process at a time may do; nothing where that is None.

    A line is with the operating system when the call returns, so it outlives whatever happens to
    this process. One that cannot be written is logged and left out. Raises SettingsError when the
    file cannot be opened.
    """
    if path is None:
        yield lambda _contribution, _receipt: None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise SettingsError(f"--receipts {path}: {error.strerror}") from error

    def add(contribution: Contribution, receipt: Receipt) -> None:
        try:
            file.write(_line(contribution, receipt))
        except OSError as error:
            _log.warning("receipt_not_written", reason=str(error))

    with file:
        yield add


def _line(contribution: Contribution, receipt: Receipt) -> bytes:
    key, payload = contribution.key, contribution.payload
    line = {
        "learner": key.learner,
        "fragment": key.fragment,
        "epoch": key.base_version.epoch,
        "version": key.base_version.number,
        "crc32c": payload.crc32c,
        "num_bytes": len(payload.data),
        "late": receipt.late,
        "duplicate": receipt.duplicate,
        "pid": os.getpid(),
        "unix_s": time.time(),
    }
    return json.dumps(line).encode() + b"\n"
