"""Stdout, for people and for pipes."""

from __future__ import annotations

import sys

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
