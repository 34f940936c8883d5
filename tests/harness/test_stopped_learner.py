"""A learner process that is stopped for longer than its lease, and one that was replaced."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from fragments.records import LearnerState, LearnerStatus
from harness.environment import child_environment, command
from harness.processes import Command, Supervisor
from learner.run import Learner
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from services.client import GrpcLink
from services.outer.server import OuterServices
from services.settings import ServerSettings
from tests.support.tiny import TinyProgram, tiny_birth, tiny_spec

LIMIT_S = 90.0


def _until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


class Site:
    """A served run and its learners: threads of this process, and one that is a process."""

    def __init__(self, server: OuterServer, address: str) -> None:
        self.server = server
        self.address = address
        self.stop = threading.Event()

    def learn(self, name: str) -> None:
        link = GrpcLink(self.address)
        try:
            Learner(name, TinyProgram(), link, link.describe(), pace_s=0.02).run(self.stop)
        finally:
            link.close()

    def until(self, name: str, is_so: Callable[[LearnerStatus], bool]) -> LearnerStatus:
        """The learner once it is so."""
        found: list[LearnerStatus] = []

        def look() -> bool:
            learners = self.server.status().learners
            found[:] = [one for one in learners if one.name == name and is_so(one)]
            return bool(found)

        _until(look)
        return found[0]

    def nothing_is_doubled(self) -> bool:
        status = self.server.status()
        trained = sum(one.tokens for one in status.learners)
        merged = sum(one.tokens_merged for one in status.learners)
        counted = (status.tokens_trained, status.tokens_merged)
        return counted == (trained, merged) and merged <= len(status.fragments) * trained


@contextmanager
def _served(path: Path) -> Iterator[Site]:
    spec = tiny_spec(
        program={"factory": "tests.harness.factory:build"},
        budget_tokens=16 * 10**6,
        lease_ttl_s=1.5,
    )
    create_run(path, spec, *tiny_birth(spec))
    with OuterServer(path) as server:
        services = OuterServices(server, ServerSettings(address="127.0.0.1:0", bulk_port=0))
        services.start()
        site = Site(server, str(services.address))
        try:
            yield site
        finally:
            site.stop.set()
            services.stop()


@pytest.mark.timeout(110)
def test_who_was_stopped_rejoins_and_who_was_replaced_is_fenced_off(tmp_path: Path) -> None:
    with (
        ThreadPoolExecutor(2) as pool,
        _served(tmp_path / "run") as site,
        Supervisor() as processes,
    ):
        pool.submit(site.learn, "a")
        argv = command("learn", "--address", site.address, "--name", "b", "--pace-s", "0.02")
        environ, log = child_environment(), tmp_path / "b.log"
        processes.start(Command("b", argv, log, environ, max_restarts=3))
        site.until("b", lambda one: one.contributions_merged >= 2)
        pid = processes.pids()["b"]

        os.kill(pid, signal.SIGSTOP)
        lost = site.until("b", lambda one: one.state is LearnerState.LOST)
        rounds = site.server.status().rounds_merged
        _until(lambda: site.server.status().rounds_merged > rounds + 4)
        os.kill(pid, signal.SIGCONT)
        back = site.until("b", lambda one: one.contributions_merged > lost.contributions_merged + 2)
        assert (back.joins, back.state) == (2, LearnerState.TRAINING)
        assert back.token > lost.token
        assert site.nothing_is_doubled()

        # Stopped again: a second process takes the name, and only then the first one goes on.
        os.kill(pid, signal.SIGSTOP)
        site.until("b", lambda one: one.state is LearnerState.LOST)
        newer = pool.submit(site.learn, "b")
        taken = site.until("b", lambda one: one.joins == 3)
        os.kill(pid, signal.SIGCONT)

        def has_ended() -> bool:
            processes.poll()
            return processes.settled("b")

        _until(has_ended)
        assert processes.exit_code("b") == 4, "refused: not started again"
        merged = taken.contributions_merged
        site.until("b", lambda one: one.contributions_merged > merged + 2)
        assert site.nothing_is_doubled()
        site.stop.set()
        newer.result(LIMIT_S)
