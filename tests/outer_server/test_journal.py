"""The journal: what is acknowledged comes back, damage is cut and said, a full disk waits."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fragments.disk import RealDisk
from fragments.errors import RefusedError, RunDirectoryError, StorageError
from fragments.records import (
    Adopted,
    Contribution,
    ContributionKey,
    Hello,
    Lease,
    Published,
    Report,
    Role,
    ServerNote,
    Version,
)
from outer_server import history
from outer_server.core.events import Attached
from outer_server.recovery import recover
from outer_server.saver import SnapshotRule
from outer_server.server import OuterServer
from outer_server.store.rundir import RunDirectory, create_run
from outer_server.store.tape import FORMAT
from tests.support.crash import SamePlace, crashed
from tests.support.story import Story, noise
from tests.support.tiny import tiny_birth, tiny_spec

WAIT_S = 60.0
HELLO = Hello(1, "tiny", "", "b", Role.LEARNER, "b")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was served twice; do not change it."""
    story = Story(tmp_path_factory.mktemp("served"), keep_journal=True)
    story.live(7, "1")
    story.live(4, "2")
    return story.run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    spec = tiny_spec(budget_tokens=1 << 40, sync_interval=2)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    return tmp_path / "run"


class Learner:
    """One learner that does what it is told."""

    def __init__(self, server: OuterServer, name: str) -> None:
        self._server = server
        self.published = threading.Semaphore(0)
        digest = server.describe().layout_digest
        self.lease = server.join(Hello(1, "tiny", digest, name, Role.LEARNER, name)).lease
        self.adopt()
        server.attach(self.lease, self._hear)
        server.report(self.lease, Report(1, 16, 1))

    def adopt(self, step: int = 0) -> None:
        state = self._server.state
        for index, fragment in enumerate(state.fragments):
            at = Version(state.epoch, fragment.version)
            self._server.adopted(self.lease, Adopted(index, at, fragment.digest, step))

    def contribution(self, fragment: int = 0, base: int = 0, seed: int = 0) -> Contribution:
        at = Version(self._server.state.epoch, base)
        key = ContributionKey(self.lease.learner, fragment, at)
        payload = noise(self._server.state.spec, *_layout(self._server), fragment, seed)
        return Contribution(key, at, 1, 16, 0, 1, payload)

    def push(self, **what: int) -> None:
        self._server.contribute(self.lease, self.contribution(**what))

    def _hear(self, note: ServerNote) -> None:
        if isinstance(note, Published) and note.version.number > 0:
            self.published.release()


def _layout(server: OuterServer) -> tuple[Any]:
    return (server._directory.layout,)


def test_what_was_acknowledged_and_not_merged_waits_after_a_crash(tmp_path: Path) -> None:
    # With one learner of two no round opens.
    spec = tiny_spec(min_learners=2)
    run = tmp_path / "run"
    create_run(run, spec, *tiny_birth(spec))
    with OuterServer(run, disk=SamePlace()) as server:
        lone = Learner(server, "a")
        lone.push(fragment=1)
        lease: Lease = lone.lease
        crashed(run, tmp_path / "crashed")
        (waiting,) = server.state.fragments[1].arrived
    with OuterServer(tmp_path / "crashed", disk=SamePlace()) as server:
        assert server.state.fragments[1].arrived == (waiting,)
        assert server.state.learners["a"].token == lease.token
        assert server.contribute(lease, lone.contribution(fragment=1)).duplicate
        server.report(lease, Report(2, 32, 2))
        assert (server.status().epoch, server.status().generation) == (1, 2)


def test_a_replay_computes_every_digest_again(served: Path) -> None:
    told: list[tuple[int, int]] = []
    found = history.replay(served, lambda done, among: told.append((done, among)))
    assert (found.differences, found.damage) == ((), "")
    assert found.merges >= 2
    assert found.snapshots >= 2
    assert told[-1] == (found.events, found.events)
    assert history.newest(served).state == found.state


def test_a_replay_finds_what_is_not_as_it_was(served: Path, tmp_path: Path) -> None:
    shutil.copytree(served, tmp_path / "run")
    path = tmp_path / "run" / "journal" / "tape.sqlite"
    with sqlite3.connect(path) as tape:
        (number,) = tape.execute(
            "SELECT max(number) FROM event WHERE kind = 'Contributed'"
        ).fetchone()
        tape.execute(
            "UPDATE event SET body = replace(body, '16', '17') WHERE number = ?", (number,)
        )
    found = history.replay(tmp_path / "run")
    assert f"event {number}: it does not match its checksum" in found.damage


def test_the_events_are_told_without_the_weights(served: Path) -> None:
    happened = list(history.events(served))
    notes = [note.what for each in happened for note in each.notes]
    assert "round_closed" in notes
    assert happened[-1].state.rounds_merged >= 11
    numbers = [each.record.number for each in happened]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@pytest.mark.parametrize("victim", ["event", "payload"])
def test_a_damaged_tail_is_cut_at_the_last_whole_record_in_a_new_epoch(
    served: Path, tmp_path: Path, victim: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(served, run)
    for name in sorted(path.name for path in (run / "snapshots").iterdir())[1:]:
        shutil.rmtree(run / "snapshots" / name)
    if victim == "payload":
        newest = max((run / "journal" / "payloads").iterdir())
        data = newest.read_bytes()
        newest.write_bytes(data[: len(data) // 2])
    else:
        with sqlite3.connect(run / "journal" / "tape.sqlite") as tape:
            (last,) = tape.execute("SELECT max(number) FROM event").fetchone()
            tape.execute("UPDATE event SET at_s = at_s + 1 WHERE number = ?", (last - 3,))
    before = list(_readable(run))
    with RunDirectory(run, SamePlace()) as directory:
        found = recover(directory, keep_journal=True, take_over=False)
        found.journal.close()
    assert "the journal is damaged" in found.lost
    assert found.state.epoch == 2
    assert found.state.rounds_merged <= before[-1].state.rounds_merged
    # What is left is whole, and goes on.
    with OuterServer(run, disk=SamePlace()) as server:
        assert server.status().epoch == 2
    assert history.replay(run).damage == ""


def _readable(run: Path) -> list[history.Happened]:
    found: list[history.Happened] = []
    with suppress(RunDirectoryError):
        found.extend(history.events(run))
    return found


def test_a_tape_that_is_no_tape_is_set_aside_in_a_new_epoch(served: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(served, run)
    (run / "journal" / "tape.sqlite").write_bytes(b"no database at all" * 100)
    with OuterServer(run, disk=SamePlace()) as server:
        assert server.status().epoch == 2
    assert (run / "journal" / "tape.sqlite.damaged").exists()


def test_a_tape_of_another_format_is_refused(served: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(served, run)
    with sqlite3.connect(run / "journal" / "tape.sqlite") as tape:
        tape.execute(f"PRAGMA user_version = {FORMAT + 1}")
    sentence = f"format {FORMAT + 1}, this program knows {FORMAT}"
    with pytest.raises(RunDirectoryError, match=sentence), OuterServer(run, disk=SamePlace()):
        pass
    with pytest.raises(RunDirectoryError, match=sentence):
        list(history.events(run))


class FullDisk(RealDisk):
    """A disk without room while `is_full`."""

    is_full = False

    def open(self, path: Path) -> Any:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().open(path)

    def commit(self, database: sqlite3.Connection) -> None:
        if self.is_full:
            raise sqlite3.OperationalError("database or disk is full")
        super().commit(database)


def test_a_full_disk_refuses_pushes_serves_the_rest_and_recovers(run: Path) -> None:
    disk = FullDisk()
    with OuterServer(run, disk=disk) as server:
        a, b = Learner(server, "a"), Learner(server, "b")
        a.push(fragment=0)
        disk.is_full = True
        with pytest.raises(StorageError, match="room"):
            b.push(fragment=0)
        with pytest.raises(StorageError, match="room"):
            Learner(server, "c")
        assert server.updates(a.lease, 0, None)[0].version == Version(1, 0)
        assert "journal" in server.status().phase_reason
        server.report(a.lease, Report(2, 32, 2))
        disk.is_full = False
        b.push(fragment=0)
        for step in range(3, 40):
            for learner in (a, b):
                server.report(learner.lease, Report(step, 16 * step, step))
            if a.published.acquire(timeout=0.5):
                break
        status = server.status()
        assert status.rounds_merged >= 1
        assert "journal" not in status.phase_reason
        assert [learner.contributions_merged for learner in status.learners] == [1, 1]
    assert history.replay(run).differences == ()


def test_a_version_that_cannot_be_made_durable_is_not_published_until_it_can(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk()
    with OuterServer(run, disk=disk) as server:
        a, b = Learner(server, "a"), Learner(server, "b")
        merge = server._engine._holdings.merge

        def and_then_full(*args: Any) -> Any:
            merged = merge(*args)
            disk.is_full = True
            return merged

        monkeypatch.setattr(server._engine._holdings, "merge", and_then_full)
        for learner in (a, b):
            learner.push(fragment=0)
        for step in range(2, 20):
            for learner in (a, b):
                server.report(learner.lease, Report(step, 16 * step, step))
            if a.published.acquire(timeout=0.2) or server._engine.stalled:
                break
        assert not a.published.acquire(timeout=1.0)
        assert server.updates(a.lease, 0, None)[0].version == Version(1, 0)
        monkeypatch.undo()
        disk.is_full = False
        assert a.published.acquire(timeout=WAIT_S)
        assert server.updates(a.lease, 0, None)[0].version == Version(1, 1)
    assert history.replay(run).differences == ()


def test_what_the_scheduler_was_not_told_of_is_not_on_the_tape(run: Path) -> None:
    with OuterServer(run) as server:
        first = Learner(server, "a")
        Learner(server, "a2")
        stale = replace(first.lease, token=first.lease.token - 1)
        with pytest.raises(RefusedError):
            server.attach(stale, lambda _: None)
    attached = [
        happened.record.event.token
        for happened in history.events(run)
        if isinstance(happened.record.event, Attached)
    ]
    assert len(attached) == 2
    assert stale.token not in attached


def test_a_tape_that_grows_without_rounds_is_covered_by_snapshots_too(run: Path) -> None:
    with OuterServer(run, SnapshotRule(every_events=50)) as server:
        learner = Learner(server, "a")
        for step in range(1, 2000):
            server.report(learner.lease, Report(step, 16 * step, step))
            server.join(replace(HELLO, layout_digest=server.describe().layout_digest))
            if (run / "snapshots" / "000001").exists():
                break
        assert (run / "snapshots" / "000001").exists()
        assert server.state.rounds_merged == 0
