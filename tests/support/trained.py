"""Learners that train in threads of this process, as tests of a whole server need them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from learner.ports import Link
from learner.run import Learner, Outcome
from tests.support.tiny import TinyProgram

WAIT_S = 60.0


@contextmanager
def training(
    link: Callable[[], Link], *names: str, pace_s: float = 0.004
) -> Iterator[dict[str, Future[Outcome]]]:
    """While inside, learners of these names train; afterwards they have been stopped."""
    stop = threading.Event()

    def learn(name: str) -> Outcome:
        own = link()
        try:
            return Learner(name, TinyProgram(), own, own.describe(), pace_s=pace_s).run(stop)
        finally:
            own.close()

    with ThreadPoolExecutor(len(names)) as pool:
        try:
            yield {name: pool.submit(learn, name) for name in names}
        finally:
            stop.set()


def until(condition: Callable[[], bool], what: str = "") -> None:
    """Wait until something is so; AssertionError when it does not come."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"waited too long{what and ' for ' + what}")
