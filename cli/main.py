"""The command's entry. It imports next to nothing, so that it can be stopped from the start."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_STOPPED = 130
"""See `cli.exit`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `diloco ARGV` and returns its exit code (the table is in `cli.exit`)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _terminable():
            # A third of a second of imports, which must not end in a traceback either.
            from cli.command import run_command

            return run_command(words)
    except KeyboardInterrupt:
        # Once is enough: a repeat must not cut the sentence short.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("diloco: stopped before it was done", file=sys.stderr)
        return _STOPPED


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends what a verb does not guard itself as Ctrl-C does, its clean-up included."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        # After a stop the handler that swallows repeats stays.
        if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
            signal.signal(signal.SIGTERM, previous)
