"""Stdout, for people and for pipes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

WIDTH_OF_A_PIPE = 110
"""Columns where there is no terminal to ask."""


def console() -> Console:
    """Stdout as rich sees it: as wide as the terminal, or WIDTH_OF_A_PIPE columns."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=WIDTH_OF_A_PIPE)


def live(screen: Console) -> Live:
    """A picture that is redrawn in place; on what is not a terminal nothing of it is left."""
    return Live(console=screen, refresh_per_second=4, transient=not screen.is_terminal)


def say(line: str) -> None:
    """One line to stdout, at once and whole: neither wrapped nor coloured."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextmanager
def counted(what: str, *, to_stderr: bool) -> Iterator[Callable[[int, int], None]]:
    """A function that is told how many are done of how many, and says so: in place on a terminal,
    now and then where there is none.
    """
    out = sys.stderr if to_stderr else sys.stdout
    every_s = 0.2 if out.isatty() else 10.0
    said_s = time.monotonic()

    def tell(done: int, among: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= every_s:
            said_s = time.monotonic()
            out.write(f"\r{done} of {among} {what}" + ("" if out.isatty() else "\n"))
            out.flush()

    yield tell
    if out.isatty():
        out.write("\r\033[K")
