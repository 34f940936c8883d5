"""Learners that die and come back over real gRPC: nothing that was taken counts twice."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fragments.errors import StorageError
from fragments.records import Receipt
from harness.environment import child_environment
from harness.ports import free_ports
from learner.run import CheckpointRule, Learner, Outcome
from outer_server import engine
from outer_server.core.events import Contributed, Effect, Event, Reply
from outer_server.core.intervals import Reason, account
from outer_server.core.scheduler import Outcome as Handled
from outer_server.core.scheduler import handle
from outer_server.core.state import RunState
from outer_server.history import data_account
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from services.client import GrpcLink
from services.outer.server import OuterServices
from services.settings import ServerSettings
from tests.support import mortal
from tests.support.tiny import TinyProgram, tiny_birth, tiny_spec

WAIT_S = 60.0
PACE_S = 0.02
AWAY_STEPS = 150
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
    settings = tiny_spec(**{"budget_tokens": 16 * 10**6, "lease_ttl_s": 2.0, **spec})
    create_run(path, settings, *tiny_birth(settings))
    with _serving(path, (0, 0)) as served:
        yield served


@contextmanager
def _serving(path: Path, ports: tuple[int, int]) -> Iterator[tuple[OuterServer, str]]:
    """A run that is there, at these ports: control and bulk."""
    with OuterServer(path) as server:
        address = f"127.0.0.1:{ports[0]}"
        services = OuterServices(server, ServerSettings(address=address, bulk_port=ports[1]))
        services.start()
        try:
            yield server, str(services.address)
        finally:
            services.stop()


def _learn(address: str, name: str, stop: threading.Event, kept: Path | None) -> Outcome:
    link = GrpcLink(address)
    rule = CheckpointRule(kept, every_s=0.05) if kept is not None else None
    try:
        learner = Learner(
            name, TinyProgram(), link, link.describe(), pace_s=PACE_S, checkpoints=rule
        )
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


def test_what_is_trained_while_nobody_answers_comes_into_the_weights(
    tmp_path: Path, tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushes fail, then the server is gone: what was made in vain goes out with all steps since."""
    run, stop, ports = tmp_path / "run", threading.Event(), free_ports(2)
    settings = tiny_spec(budget_tokens=16 * 10**6, lease_ttl_s=30.0)
    create_run(run, settings, *tiny_birth(settings))
    took = OuterServer.contribute

    def take_none(*_: Any) -> Any:
        raise StorageError("no room")

    with ThreadPoolExecutor(2) as pool, ExitStack() as whatever_happens:
        whatever_happens.callback(stop.set)
        with _serving(run, (ports[0], ports[1])) as (server, address):
            ends = [pool.submit(_learn, address, name, stop, None) for name in "ab"]
            _until(lambda: server.status().rounds_merged >= 6)
            monkeypatch.setattr(OuterServer, "contribute", take_none)
            global_step = server.status().global_step
            # Each fragment's turn comes within these.
            _until(lambda: server.status().global_step >= global_step + 12)
        monkeypatch.setattr(OuterServer, "contribute", took)
        threading.Event().wait(AWAY_STEPS * PACE_S)
        began = len(tape)
        with _serving(run, (ports[0], ports[1])) as (server, _):

            def longest(name: str) -> int:
                told = [e for e, reply, _ in tape[began:] if isinstance(reply, Receipt)]
                return max(
                    (
                        e.meta.steps
                        for e in told
                        if isinstance(e, Contributed) and e.learner == name
                    ),
                    default=0,
                )

            # One of them may have handed in before what it had on each base; not both of them.
            _until(lambda: max(longest("a"), longest("b")) >= AWAY_STEPS)
            # Only a grant says what has arrived; who comes back last may take some seconds.
            _until(lambda: all(one.joins >= 2 for one in server.status().learners))
            stop.set()
            assert all(end.result(WAIT_S).steps > AWAY_STEPS for end in ends)
    found = data_account(run)
    assert (found.overlaps, found.miscounts) == ((), ())
