"""The status watcher, over connections that come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fragments.errors import UnreachableError
from fragments.records import RunStatus
from harness import watcher as watcher_module
from harness.watcher import StatusWatcher
from tests.harness.statuses import status


def _until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_the_newest_snapshot_is_taken_once_and_breaks_are_survived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher_module, "_RETRY_S", 0.01)
    calls: list[str] = []
    go_on = threading.Event()

    def watch(address: str, interval_s: float) -> Iterator[RunStatus]:
        calls.append(address)
        if len(calls) == 1:
            raise UnreachableError("not yet")
        yield status(len(calls))
        if len(calls) == 3:
            go_on.wait(10)

    with StatusWatcher("x:1", 0.01, watch) as watcher:
        _until(lambda: len(calls) == 3)
        steps: list[int] = []

        def has_the_newest() -> bool:
            fresh = watcher.take()
            steps.extend([fresh.global_step] if fresh is not None else [])
            return steps[-1:] == [3]

        _until(has_the_newest)
        assert watcher.take() is None
        assert watcher.trouble == ""
        go_on.set()
    assert calls[:3] == ["x:1"] * 3


def test_trouble_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "_RETRY_S", 0.01)

    def watch(address: str, interval_s: float) -> Iterator[RunStatus]:
        raise UnreachableError(f"nobody at {address}")

    with StatusWatcher("y:2", 0.01, watch) as watcher:
        _until(lambda: watcher.trouble != "")
        assert watcher.trouble == "nobody at y:2"
        assert watcher.take() is None
