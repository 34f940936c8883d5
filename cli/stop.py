"""A clean stop: signals and the parent's death become one event that the verb waits on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_WITHIN_S = 5.0
"""A process that was told to stop is gone after this long, whatever it was doing."""

_HARD_END_S = 0.4
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signal(
    *, exit_with_parent: bool = False, within_s: float = STOP_WITHIN_S
) -> Iterator[threading.Event]:
    """Yields an event that SIGINT or SIGTERM sets; must be entered in the main thread.

    A verb that has not ended a little before `within_s` seconds after the event is ended hard,
    with exit code 1. A second signal ends it at once. With `exit_with_parent`, the end of stdin (a
    pipe that the parent holds open, which closes even when the parent is killed with -9) counts
    as a signal.
    """
    stop, done = threading.Event(), threading.Event()
    wake_read, wake_write = os.pipe()
    signals_seen: list[int] = []

    # The handler runs in the main thread, perhaps while that thread holds the event's own lock:
    # setting the event from here could wait for itself for ever. So it only writes a byte.
    def on_signal(number: int, _frame: FrameType | None) -> None:
        signals_seen.append(number)
        if len(signals_seen) > 1:
            os._exit(1)
        os.write(wake_write, b"s")

    def await_signal() -> None:
        if os.read(wake_read, 1) == b"s":
            _begin(stop, done, within_s)

    previous = {each: signal.signal(each, on_signal) for each in _SIGNALS}
    watcher = threading.Thread(target=await_signal, daemon=True, name="stop-watch")
    watcher.start()
    if exit_with_parent:
        threading.Thread(
            target=_await_parent, args=(stop, done, within_s), daemon=True, name="parent-watch"
        ).start()
    try:
        yield stop
    finally:
        done.set()
        for each, handler in previous.items():
            signal.signal(each, handler)
        os.write(wake_write, b"x")
        watcher.join(timeout=1.0)
        os.close(wake_read)
        os.close(wake_write)


def _await_parent(stop: threading.Event, done: threading.Event, within_s: float) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    _begin(stop, done, within_s)


def _begin(stop: threading.Event, done: threading.Event, within_s: float) -> None:
    """Sets the event, and ends the process hard if that is not enough. Blocks until either."""
    if stop.is_set():
        return
    stop.set()
    if not done.wait(within_s - _HARD_END_S):
        print(
            f"diloco: did not end within {within_s:g} s of being told to: ended hard",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
