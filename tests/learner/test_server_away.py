"""The server goes away and comes back: nobody stops training, nothing counts twice."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import structlog

from fragments.errors import RefusedError, RunDirectoryError, UnreachableError
from fragments.records import (
    Contribution,
    Hello,
    Lease,
    Phase,
    Receipt,
    RefusalCode,
    RunDescription,
    ServerNote,
    Update,
    Version,
    Welcome,
)
from fragments.sealed import seal, unseal
from learner.ports import ControlLine
from learner.program import Shard
from learner.run import Learner
from outer_server.history import data_account
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from tests.support.direct import DirectLink
from tests.support.tiny import TinyProgram, tiny_birth, tiny_spec

WAIT_S = 60.0


class Site:
    """A run directory whose server can be stopped and started; links go to the present one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._server: OuterServer | None = None
        self.lose_next_receipt = threading.Event()
        self.pushes: list[Contribution] = []
        self.vain_joins = 0
        self.has_no_way_up = threading.Event()

    def start(self, *, take_over: bool = False) -> OuterServer:
        server = OuterServer(self.path, take_over=take_over)
        self._server = self._stack.enter_context(server)
        return self._server

    def stop(self) -> None:
        self._server = None
        self._stack.close()

    @property
    def is_away(self) -> bool:
        return self._server is None

    def link(self) -> DirectLink:
        if self._server is None:
            raise UnreachableError("the server is away")
        return DirectLink(self._server)


class AwayLink:
    """A link that finds the site's server or is unreachable."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.arrived_bytes = 0

    def describe(self) -> RunDescription:
        return self._site.link().describe()

    def join(self, hello: Hello) -> Welcome:
        self._site.vain_joins += self._site.is_away
        return self._site.link().join(hello)

    def open_control(
        self,
        lease: Lease,
        on_note: Callable[[ServerNote], None],
        on_closed: Callable[[], None],
    ) -> ControlLine:
        return self._site.link().open_control(lease, on_note, on_closed)

    def push(self, lease: Lease, contribution: Contribution) -> Receipt:
        if self._site.has_no_way_up.is_set():
            raise UnreachableError("the push did not come through")
        receipt = self._site.link().push(lease, contribution)
        self._site.pushes.append(contribution)
        if self._site.lose_next_receipt.is_set():
            self._site.lose_next_receipt.clear()
            raise UnreachableError("the answer was lost")
        return receipt

    def pull(self, lease: Lease, fragment: int, have: Version | None) -> tuple[Update, ...]:
        updates = self._site.link().pull(lease, fragment, have)
        self.arrived_bytes += sum(len(update.payload.data) for update in updates)
        return updates

    def leave(self, lease: Lease, reason: str) -> None:
        with suppress(UnreachableError):
            self._site.link().leave(lease, reason)

    def close(self) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    spec = tiny_spec(budget_tokens=16 * 600, min_learners=2)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    site = Site(tmp_path / "run")
    yield site
    site.stop()


def _learner(site: Site, name: str, program: TinyProgram | None = None) -> Learner:
    link = AwayLink(site)
    return Learner(name, program or TinyProgram(), link, link.describe(), pace_s=0.004)


def _until(condition: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        done.wait(0.01)
    pytest.fail("waited too long")


def test_an_orderly_restart_is_survived(site: Site) -> None:
    server = site.start()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(_learner(site, n).run, threading.Event()) for n in "ab"]
        _until(lambda: server.status().rounds_merged >= 20)
        site.stop()
        before = server.status()
        server = site.start()
        assert server.status().epoch == 1
        assert server.status().rounds_merged >= before.rounds_merged
        outcomes = [end.result(WAIT_S) for end in ends]
    after = server.status()
    assert after.phase is Phase.FINISHED
    assert {outcome.weights_digest for outcome in outcomes} == {after.weights_digest}
    # Each in the same process, and once more if it found nobody there meanwhile.
    assert all(learner.joins in (1, 2) for learner in after.learners)
    # Steps made while the server was away are counted when it is back.
    assert after.tokens_trained == sum(outcome.tokens for outcome in outcomes)
    # By the tape no batch came into a fragment twice, over the restart too.
    found = data_account(site.path)
    assert found.merged
    assert (found.overlaps, found.miscounts) == ((), ())


def test_a_server_that_goes_away_while_learners_get_ready_is_waited_for(site: Site) -> None:
    site.start()
    learners = [_learner(site, name) for name in "ab"]
    site.stop()
    with structlog.testing.capture_logs() as logs, ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(learner.run, threading.Event()) for learner in learners]
        _until(lambda: site.vain_joins >= 6)
        server = site.start()
        assert all(end.result(WAIT_S).finished for end in ends)
    assert server.status().phase is Phase.FINISHED
    # Each says so once, however often it has tried, and once that the server is back.
    said = [(line["event"], line["log_level"]) for line in logs]
    assert said.count(("server_away", "warning")) == 2
    assert said.count(("server_back", "info")) == 2


def test_who_waits_for_a_server_can_be_stopped(site: Site) -> None:
    site.start()
    learner, stop = _learner(site, "a"), threading.Event()
    site.stop()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(learner.run, stop)
        _until(lambda: site.vain_joins >= 1)
        stop.set()
        outcome = end.result(WAIT_S)
    assert (outcome.finished, outcome.steps) == (False, 0)


class Counted(TinyProgram):
    """Counts the batches that it gave out: steps, as seen from outside."""

    steps = 0

    def batch(self, shard: Shard, cursor: int) -> Any:
        self.steps += 1
        return super().batch(shard, cursor)


def test_nobody_stops_while_the_server_is_away_for_longer_than_a_lease(tmp_path: Path) -> None:
    spec = tiny_spec(budget_tokens=16 * 1200, min_learners=2, lease_ttl_s=0.5)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    site = Site(tmp_path / "run")
    server = site.start()
    programs = [Counted(), Counted()]
    with ThreadPoolExecutor(2) as pool:
        learners = [_learner(site, n, p) for n, p in zip("ab", programs, strict=True)]
        ends = [pool.submit(learner.run, threading.Event()) for learner in learners]
        _until(lambda: server.status().rounds_merged >= 10)
        site.stop()
        before = [program.steps for program in programs]
        # At this pace that many steps take more than two leases.
        _until(lambda: all(p.steps >= b + 250 for p, b in zip(programs, before, strict=True)))
        server = site.start()
        outcomes = [end.result(WAIT_S) for end in ends]
    after = server.status()
    site.stop()
    assert all(outcome.finished for outcome in outcomes)
    assert {outcome.weights_digest for outcome in outcomes} == {after.weights_digest}
    # What was trained meanwhile is counted, once.
    assert after.tokens_trained == sum(outcome.tokens for outcome in outcomes)


def test_what_is_trained_while_the_server_is_away_comes_into_the_weights(tmp_path: Path) -> None:
    spec = tiny_spec(budget_tokens=16 * 1600, min_learners=2)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    site = Site(tmp_path / "run")
    server = site.start()
    programs = [Counted(), Counted()]
    with ThreadPoolExecutor(2) as pool:
        learners = [_learner(site, n, p) for n, p in zip("ab", programs, strict=True)]
        ends = [pool.submit(learner.run, threading.Event()) for learner in learners]
        _until(lambda: server.status().rounds_merged >= 10)
        site.has_no_way_up.set()
        before = [program.steps for program in programs]
        # Each fragment's turn comes within these, so that an answer of each was made in vain.
        _until(lambda: all(p.steps >= b + 100 for p, b in zip(programs, before, strict=True)))
        site.stop()
        _until(lambda: all(p.steps >= b + 400 for p, b in zip(programs, before, strict=True)))
        site.has_no_way_up.clear()
        site.start()
        outcomes = [end.result(WAIT_S) for end in ends]
    site.stop()
    assert all(outcome.finished for outcome in outcomes)
    # What one of them had handed in on its bases already cannot grow; not both had on all of them.
    assert max(push.steps for push in site.pushes) >= 400
    found = data_account(site.path)
    assert (found.overlaps, found.miscounts) == ((), ())


def test_without_its_journal_a_server_begins_a_new_epoch(site: Site) -> None:
    server = site.start()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(_learner(site, n).run, threading.Event()) for n in "ab"]
        _until(lambda: server.status().rounds_merged >= 10)
        site.stop()
        record = unseal((site.path / "server.json").read_bytes())
        (site.path / "server.json").write_bytes(seal(record | {"clean": False}))
        shutil.rmtree(site.path / "journal")
        with pytest.raises(RunDirectoryError, match="--take-over"):
            site.start()
        server = site.start(take_over=True)
        outcomes = [end.result(WAIT_S) for end in ends]
    after = server.status()
    assert after.epoch == 2
    assert {outcome.weights_digest for outcome in outcomes} == {after.weights_digest}
    assert [learner.joins for learner in after.learners] == [2, 2]


def test_a_lost_receipt_is_asked_for_again_and_counts_once(site: Site) -> None:
    server = site.start()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(_learner(site, n).run, threading.Event()) for n in "ab"]
        _until(lambda: server.status().rounds_merged >= 6)
        site.lose_next_receipt.set()
        _until(lambda: not site.lose_next_receipt.is_set())
        for end in ends:
            end.result(WAIT_S)
    keys = [push.key for push in site.pushes]
    assert len(keys) - len(set(keys)) == 1, "the lost one was repeated"
    merged = sum(learner.contributions_merged for learner in server.status().learners)
    assert merged <= len(set(keys))


def test_a_doubled_process_is_fenced_off_and_the_newer_goes_on(site: Site) -> None:
    server = site.start()
    with ThreadPoolExecutor(3) as pool:
        older = pool.submit(_learner(site, "a").run, threading.Event())
        other = pool.submit(_learner(site, "b").run, threading.Event())
        _until(lambda: server.status().rounds_merged >= 4)
        newer = pool.submit(_learner(site, "a").run, threading.Event())
        with pytest.raises(RefusedError) as fenced:
            older.result(WAIT_S)
        assert newer.result(WAIT_S).finished
        assert other.result(WAIT_S).finished
    assert fenced.value.code is RefusalCode.FENCED


def test_a_stopped_learner_leaves_and_says_so(site: Site) -> None:
    server = site.start()
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        a = pool.submit(_learner(site, "a").run, stop)
        b = pool.submit(_learner(site, "b").run, stop)
        _until(lambda: server.status().rounds_merged >= 4)
        stop.set()
        outcomes = [a.result(WAIT_S), b.result(WAIT_S)]
    assert not any(outcome.finished for outcome in outcomes)
    assert [learner.state.value for learner in server.status().learners] == ["left", "left"]
    assert server.status().phase is Phase.WAITING
