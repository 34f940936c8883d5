"""The status of a run on the terminal: once, followed, or as JSON. Imports no jax.

`python -m harness.status ADDRESS INTERVAL_S` follows it as JSON, a line at each look, until its
stdin ends: for a parent that cannot reach the server itself.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import threading
from typing import Any

from fragments.errors import UnreachableError
from fragments.records import Phase, RunStatus
from harness.recorder import Recorder
from harness.terminal import console, live, say
from harness.view import status_line, status_view
from harness.watcher import StatusWatcher
from services.client.status import fetch_status

FIRST_ANSWER_S = 10.0
"""How long a watcher waits for the first answer."""


def show_status(address: str, *, as_json: bool) -> None:
    """Prints the run's status to stdout.

    Raises:
        UnreachableError: when nobody answers at `address`.
    """
    status = fetch_status(address)
    if as_json:
        say(status_json(status, indent=2))
    else:
        console().print(status_view(status))


def watch_run(
    address: str, interval_s: float, stop: threading.Event, *, as_json: bool = False
) -> None:
    """Follows a run until it is finished or `stop` is set.

    On a terminal it is one picture that changes; otherwise one line (of JSON, with `as_json`) at
    each interval. A server that goes away is waited for.

    Raises:
        UnreachableError: when nobody answers within FIRST_ANSWER_S.
    """
    recorder = Recorder()
    screen = console()
    with StatusWatcher(address, interval_s) as watcher, live(screen) as picture:
        waited_s = 0.0
        while not stop.is_set():
            status = watcher.take()
            if status is None:
                stop.wait(interval_s / 4)
                waited_s += interval_s / 4
                if recorder.last is None and waited_s > FIRST_ANSWER_S:
                    raise UnreachableError(watcher.trouble or f"no answer from {address}")
                continue
            recorder.record(status, status.uptime_s)
            if as_json:
                say(status_json(status))
            elif screen.is_terminal:
                losses = [one.loss for one in recorder.evaluations]
                picture.update(status_view(status, losses))
            else:
                say(status_line(status))
            if status.phase is Phase.FINISHED:
                return


def status_json(status: RunStatus, indent: int | None = None) -> str:
    """Strict JSON: what is not finite becomes null."""
    return json.dumps(_plain(dataclasses.asdict(status)), indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _follow_for_parent(address: str, interval_s: str) -> None:
    stop = threading.Event()

    def await_parent() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=await_parent, daemon=True).start()
    watch_run(address, float(interval_s), stop, as_json=True)


if __name__ == "__main__":
    _follow_for_parent(*sys.argv[1:])
