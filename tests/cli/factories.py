"""Factories of programs that tests of the command give to `--program.factory`."""

from __future__ import annotations

import sys
import threading
from typing import Any

from tests.support.tiny import TinyProgram


class _OnData(TinyProgram):
    def __init__(self, data: str | None) -> None:
        super().__init__()
        self.data_digest = f"digest of {data}"


def endless(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """Says that it builds, and goes on building: what is compiled for long looks like that."""
    del settings, data, seed
    sys.stdout.write("building\n")
    sys.stdout.flush()
    threading.Event().wait()
    raise AssertionError("unreachable")


def on_data(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """The tiny program, which tells the name of its data as the digest."""
    del settings, seed
    return _OnData(data)
