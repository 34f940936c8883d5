"""When training outruns what is sent and fetched, and when that merely cannot be done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import learner.member
from fragments.errors import PayloadError, UnreachableError
from fragments.records import Contribution, LearnerStatus, Lease, Receipt, Update, Version
from learner.backlog import Backlog
from learner.run import Learner
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from tests.support.direct import DirectLink
from tests.support.tiny import TinyProgram, tiny_birth, tiny_spec

WAIT_S = 20.0


def test_a_backlog_counts_from_its_first_busy_moment() -> None:
    step = 10
    backlog = Backlog(lambda: step)
    assert backlog.steps == 0
    backlog.busy()
    step = 14
    backlog.busy()
    assert backlog.steps == 4
    backlog.idle()
    assert backlog.steps == 0
    backlog.busy()
    step = 15
    assert backlog.steps == 1


class SlowLink(DirectLink):
    """A push takes as many steps of the learner as it is told, or fails."""

    def __init__(self, server: OuterServer, steps: Callable[[], int]) -> None:
        super().__init__(server)
        self.steps = steps
        self.push_steps: int | None = 0

    def push(self, lease: Lease, contribution: Contribution) -> Receipt:
        if self.push_steps is None:
            raise UnreachableError("the server is away")
        until = self.steps() + self.push_steps
        give_up_s = time.monotonic() + WAIT_S
        while self.steps() < until and time.monotonic() < give_up_s:
            threading.Event().wait(0.001)
        return super().push(lease, contribution)


def test_a_learner_says_when_its_pushes_take_longer_than_a_round_lasts(tmp_path: Path) -> None:
    """H is 4 steps, with two fragments: a push of one step keeps up, one of five does not."""
    spec = tiny_spec(budget_tokens=1 << 40)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with OuterServer(tmp_path / "run") as server:

        def me() -> LearnerStatus:
            return server.status().learners[0]

        def until(condition: Callable[[], bool]) -> None:
            give_up_s = time.monotonic() + WAIT_S
            while not condition():
                assert time.monotonic() < give_up_s, "did not happen in time"
                threading.Event().wait(0.005)

        link = SlowLink(server, lambda: me().steps if server.status().learners else 0)
        learner = Learner("a", TinyProgram(), link, link.describe(), pace_s=0.01)
        stop = threading.Event()
        thread = threading.Thread(target=learner.run, args=(stop,), daemon=True)
        thread.start()
        until(lambda: bool(server.status().learners) and me().contributions_merged > 4)
        link.push_steps = 5
        until(lambda: me().outruns)
        link.push_steps = 0
        until(lambda: not me().outruns)
        link.push_steps = 5
        until(lambda: me().outruns)
        link.push_steps = None  # what cannot be sent at all says nothing about the link's speed
        until(lambda: not me().outruns)
        stop.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()


class ThinLink(DirectLink):
    """Weights come in pieces, one every 50 ms; or they come at once, and are damaged."""

    def __init__(self, server: OuterServer, pieces: int) -> None:
        super().__init__(server)
        self.pieces = pieces

    def pull(self, lease: Lease, fragment: int, have: Version | None) -> tuple[Update, ...]:
        for _ in range(self.pieces):
            threading.Event().wait(0.05)
            self.arrived_bytes += 100
        updates = super().pull(lease, fragment, have)
        if self.pieces == 0:
            raise PayloadError("damaged on its way")
        return updates


def test_first_weights_are_waited_for_while_they_come_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thin link takes longer than the patience with silence; damaged ones are no progress."""
    monkeypatch.setattr(learner.member, "PATIENCE_S", 0.6)
    spec = tiny_spec(budget_tokens=16 * 20)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with OuterServer(tmp_path / "run") as server:
        broken = ThinLink(server, pieces=0)
        with pytest.raises(UnreachableError, match="no weights arrived for"):
            Learner("a", TinyProgram(), broken, broken.describe()).run(threading.Event())
        assert broken.arrived_bytes > 0
        thin = ThinLink(server, pieces=30)
        began_s = time.monotonic()
        stop = threading.Event()

        def on_state(state: str) -> None:
            if state == "training":
                stop.set()

        Learner("a", TinyProgram(), thin, thin.describe(), on_state=on_state).run(stop)
        assert time.monotonic() - began_s > 2 * 0.6
        assert server.status().learners[0].joins == 2
