"""A clean stop: signals and the parent's death become one event that the verb waits on."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

STOP_WITHIN_S = 5.0
"""A process that was told to stop is gone after this long, whatever it was doing."""

INSIST_AFTER_S = 2.0
"""A second signal that comes this long after the first is a person who will not wait. One that
comes sooner is the same wish: `timeout` and a terminal's Ctrl-C reach a process twice within
milliseconds, and a server must not lose its last snapshot by that."""

_HARD_END_S = 0.4
_NOTHING_TO_KEEP_WITHIN_S = 0.7
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OVER, _PARENT_GONE = b"\x00", b"\xff"
"""Beside the numbers of signals, which are from 1 to 64."""


@dataclass(frozen=True, slots=True)
class Unbegun:
    """How a verb ends that is stopped while it has nothing to keep.

    Until `begun` is set, a stop ends the process after a moment, even from the middle of an import
    or a compilation, with `line` (on stdout for code 0, otherwise on stderr) and exit code `code`.
    """

    begun: threading.Event
    line: str
    code: int = 0


@contextmanager
def stop_on_signal(
    *,
    exit_with_parent: bool = False,
    within_s: float = STOP_WITHIN_S,
    insist_after_s: float = INSIST_AFTER_S,
    unbegun: Unbegun | None = None,
) -> Iterator[threading.Event]:
    """Yields an event that SIGINT or SIGTERM sets; must be entered in the main thread.

    A verb that has not ended a little before `within_s` seconds after the event is ended hard,
    with exit code 1, or as `unbegun` says. A signal that comes `insist_after_s` seconds after the
    first or later ends it at once; one that comes sooner changes nothing. With `exit_with_parent`,
    the end of stdin (a pipe that the parent holds open, which closes even when the parent is
    killed with -9) counts as a signal.
    """
    stop = threading.Event()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    watch = _Watch(stop, wake_read, within_s, insist_after_s, unbegun)
    # The number of a signal arrives in the pipe at once, even while the main thread is in compiled
    # code for long. A handler in Python would wait for that, and could not set the event safely.
    previous_fd = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    previous = {each: signal.signal(each, lambda _number, _frame: None) for each in _SIGNALS}
    watcher = threading.Thread(target=watch.run, daemon=True, name="stop-watch")
    watcher.start()
    if exit_with_parent:
        threading.Thread(
            target=_await_parent, args=(wake_write,), daemon=True, name="parent-watch"
        ).start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(previous_fd)
        # Who was told to stop is ending: a repeated signal must not cut the last lines short, nor
        # what the interpreter does after them, when handlers of ours are gone.
        for each, handler in previous.items():
            signal.signal(each, signal.SIG_IGN if stop.is_set() else handler)
        os.write(wake_write, _OVER)
        watcher.join(timeout=1.0)
        os.close(wake_read)
        # With a parent to wait for, that thread still knows the descriptor: it stays open.
        if not exit_with_parent:
            os.close(wake_write)


def _await_parent(wake_write: int) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    try:
        os.write(wake_write, _PARENT_GONE)
    except BrokenPipeError:  # the verb has ended meanwhile
        return


class _Watch:
    """Reads the pipe on a thread of its own, and ends the process where the verb does not."""

    def __init__(
        self,
        stop: threading.Event,
        wake_read: int,
        within_s: float,
        insist_after_s: float,
        unbegun: Unbegun | None,
    ) -> None:
        self._stop = stop
        self._wake_read = wake_read
        self._within_s = within_s
        self._insist_after_s = insist_after_s
        self._unbegun = unbegun

    def run(self) -> None:
        """Until the verb is over, or the process."""
        first_s: float | None = None
        while True:
            word = self._read(first_s)
            if word == _OVER:
                return
            if first_s is None:
                first_s = time.monotonic()
                self._stop.set()
            elif not word:
                self._end_late()
            elif word != _PARENT_GONE and time.monotonic() - first_s >= self._insist_after_s:
                _end("diloco: told to stop again: ended at once", 1)

    def _read(self, first_s: float | None) -> bytes:
        """The next byte of the pipe; nothing once the time for a clean end is over."""
        left_s = None
        if first_s is not None:
            patience_s = self._within_s - _HARD_END_S
            if self._unbegun is not None and not self._unbegun.begun.is_set():
                patience_s = min(patience_s, _NOTHING_TO_KEEP_WITHIN_S)
            left_s = max(0.0, first_s + patience_s - time.monotonic())
        ready, _, _ = select.select([self._wake_read], [], [], left_s)
        return os.read(self._wake_read, 1) if ready else b""

    def _end_late(self) -> None:
        unbegun = self._unbegun
        if unbegun is None:
            _end(f"diloco: did not end within {self._within_s:g} s of being told to: ended hard", 1)
        if not unbegun.begun.is_set():
            _end(unbegun.line, unbegun.code)
        # It has begun since it was told: then it has the time of all others.
        self._unbegun = None


def _end(line: str, code: int) -> NoReturn:
    """The end of the process, whatever its other threads are in."""
    # Not by print: the main thread may hold the stream's lock.
    os.write(sys.stderr.fileno() if code else sys.stdout.fileno(), line.encode() + b"\n")
    os._exit(code)
