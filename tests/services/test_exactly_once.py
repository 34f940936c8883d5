"""Learners that die and come back over real gRPC: nothing that was taken counts twice."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.environment import child_environment
from learner.run import CheckpointRule, Learner, Outcome
from outer_server import engine
from outer_server.core.events import Contributed, Effect, Event, Reply
from outer_server.core.intervals import Reason, account
from outer_server.core.scheduler import Outcome as Handled
from outer_server.core.scheduler import handle
from outer_server.core.state import RunState
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from services.client import GrpcLink
from services.outer.server import OuterServices
from services.settings import ServerSettings
from tests.support import mortal
from tests.support.tiny import TinyProgram, tiny_birth, tiny_spec

WAIT_S = 60.0
Tape = list[tuple[Event, Reply, Sequence[Effect]]]


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    """All that the engine is told from now on, and what came of it."""
    kept: Tape = []

    def recorded(state: RunState, event: Event, now_s: float, layout_digest: str) -> Handled:
        outcome = handle(state, event, now_s, layout_digest)
        kept.append((event, outcome.reply, outcome.effects))
        return outcome

    monkeypatch.setattr(engine, "handle", recorded)
    return kept


@contextmanager
def _served(path: Path, **spec: object) -> Iterator[tuple[OuterServer, str]]:
    settings = tiny_spec(budget_tokens=16 * 10**6, lease_ttl_s=2.0, **spec)
    create_run(path, settings, *tiny_birth(settings))
    with OuterServer(path) as server:
        services = OuterServices(server, ServerSettings(address="127.0.0.1:0", bulk_port=0))
        services.start()
        try:
            yield server, str(services.address)
        finally:
            services.stop()


def _learn(address: str, name: str, stop: threading.Event, kept: Path | None) -> Outcome:
    link = GrpcLink(address)
    rule = CheckpointRule(kept, every_s=0.05) if kept is not None else None
    try:
        learner = Learner(name, TinyProgram(), link, link.describe(), pace_s=0.02, checkpoints=rule)
        return learner.run(stop)
    finally:
        link.close()


def _until(condition: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(int(WAIT_S / 0.02)):
        if condition():
            return
        done.wait(0.02)
    pytest.fail("waited too long")


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_learner_that_dies_between_push_and_receipt(
    tmp_path: Path, tape: Tape, has_checkpoint: bool
) -> None:
    kept, stop = tmp_path / "kept", threading.Event()
    with _served(tmp_path / "run") as (server, address), ThreadPoolExecutor(2) as pool:
        other = pool.submit(_learn, address, "b", stop, None)
        words = ("-m", mortal.__name__, address, "a", str(kept), "4")
        done = subprocess.run((sys.executable, *words), env=child_environment(), timeout=WAIT_S)
        assert done.returncode == mortal.EXIT_CODE
        died_at = len(tape)
        again = pool.submit(_learn, address, "a", stop, kept if has_checkpoint else None)

        def merged_again() -> int:
            events = [event for event, *_ in tape[died_at:]]
            return sum(isinstance(e, Contributed) and e.learner == "a" for e in events)

        _until(lambda: merged_again() >= 6)
        stop.set()
        outcome = again.result(WAIT_S)
        assert other.result(WAIT_S).steps > 0
        status = server.status()
    found = account(tape)
    assert not found.overlaps
    assert not found.miscounts
    assert {gap.reason for gap in found.gaps} <= set(Reason)
    mine = [gap for gap in found.gaps if gap.reason is Reason.CRASH]
    shard = next(i.shard for i in found.merged if i.learner == "a")
    assert {gap.shard for gap in mine} <= {shard}
    # With a checkpoint it goes on counting where that was; the server counts both processes once.
    record = next(one for one in status.learners if one.name == "a")
    assert record.joins == 2
    assert (outcome.steps > record.steps / 2) or not has_checkpoint
    assert status.tokens_trained == sum(one.tokens for one in status.learners)
