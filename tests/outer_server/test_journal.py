"""The journal: what is acknowledged comes back, damage is cut and said, a full disk waits."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fragments.digest import digest_hex
from fragments.errors import RefusedError, RunDirectoryError, StorageError
from fragments.payload import decode_f32
from fragments.records import (
    Adopted,
    Contribution,
    ContributionKey,
    Goodbye,
    Hello,
    Lease,
    Published,
    RefusalCode,
    Report,
    Role,
    ServerNote,
    Version,
)
from outer_server import history, parameters
from outer_server.core.events import Attached, Started
from outer_server.core.merge import merge as merged
from outer_server.recovery import recover
from outer_server.saver import SnapshotRule
from outer_server.server import OuterServer
from outer_server.store.payloads import PayloadFiles, Place
from outer_server.store.rundir import RunDirectory, create_run
from outer_server.store.tape import FORMAT
from tests.support.crash import SamePlace, crashed
from tests.support.power import FULL
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
        self.lost = threading.Event()
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
        if isinstance(note, Goodbye) and note.code is RefusalCode.LEASE_LOST:
            self.lost.set()


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


def test_a_copy_keeps_what_waits_and_counts_it_once(tmp_path: Path) -> None:
    """A new epoch, since the original may have gone on, and nothing acknowledged is lost by it."""
    spec = tiny_spec(min_learners=2)
    run, copy = tmp_path / "run", tmp_path / "copy"
    create_run(run, spec, *tiny_birth(spec))
    with OuterServer(run, disk=SamePlace()) as server:
        Learner(server, "a").push(fragment=1)
        crashed(run, copy)
    with OuterServer(copy, take_over=True, disk=SamePlace()) as server:
        (waiting,) = server.state.fragments[1].arrived
        assert waiting.key == ContributionKey("a", 1, Version(2, 0))
        again, other = Learner(server, "a"), Learner(server, "b")
        with pytest.raises(RefusedError, match="consumed already"):
            again.push(fragment=1, seed=5)
        step = 1
        while server.state.fragments[1].version == 0:
            step += 1
            for each in (again, other):
                server.report(each.lease, Report(step, 16 * step, step))
            if server.state.fragments[1].round is not None:
                with suppress(RefusedError):
                    other.push(fragment=1)
        assert other.published.acquire(timeout=WAIT_S)
    found = history.replay(copy)
    assert (found.differences, found.damage) == ((), "")
    account = history.data_account(copy)
    learners = [each.learner for each in account.merged if each.fragment == 1]
    assert sorted(learners) == ["a", "b"]
    assert (account.overlaps, account.miscounts) == ((), ())
    reasons = [event.reason for each in history.events(copy)
               if isinstance(event := each.record.event, Started)]  # fmt: skip
    assert reasons[-1] == "it goes on from a copy; contributions that waited: 1, kept"


def test_what_cannot_be_read_for_the_moment_is_not_given_up(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(served, run)
    for name in sorted(path.name for path in (run / "snapshots").iterdir())[1:]:
        shutil.rmtree(run / "snapshots" / name)

    def forbidden(_self: PayloadFiles, _place: Place) -> bytes:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(PayloadFiles, "read", forbidden)
        with (
            pytest.raises(RunDirectoryError, match=r"Permission denied.*nothing is lost"),
            RunDirectory(run, SamePlace()) as directory,
        ):
            recover(directory, keep_journal=True, take_over=False)
    with OuterServer(run, disk=SamePlace()) as server:
        assert server.status().epoch == 1


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
    assert "the journal is damaged" in found.reason
    assert found.state.epoch == 2
    assert found.state.rounds_merged <= before[-1].state.rounds_merged
    assert "removed from the journal: " in found.reason
    with sqlite3.connect(run / "journal" / "tape.sqlite.before-cut") as tape:
        (last,) = tape.execute("SELECT max(number) FROM event").fetchone()
    assert last > (found.journal.position or 0) - 1, "a copy of it is kept for people"
    kept = (run / "journal" / "tape.sqlite.before-cut").read_bytes()
    # What is left is whole, and goes on.
    with OuterServer(run, disk=SamePlace()) as server:
        assert server.status().epoch == 2
    assert history.replay(run).damage == ""
    # Another cut leaves the copy of the first.
    with sqlite3.connect(run / "journal" / "tape.sqlite") as tape:
        tape.execute(
            "UPDATE event SET at_s = at_s + 1 WHERE number = (SELECT max(number) FROM event)"
        )
    shutil.rmtree(max((run / "snapshots").iterdir()))
    with RunDirectory(run, SamePlace()) as directory:
        recover(directory, keep_journal=True, take_over=False).journal.close()
    assert (run / "journal" / "tape.sqlite.before-cut.2").exists()
    assert (run / "journal" / "tape.sqlite.before-cut").read_bytes() == kept


def test_a_cut_that_was_not_survived_is_no_excuse(served: Path, tmp_path: Path) -> None:
    """The tape is cut, and the server dies before it has begun the new epoch."""
    run = tmp_path / "run"
    shutil.copytree(served, run)
    for name in sorted(path.name for path in (run / "snapshots").iterdir())[1:]:
        shutil.rmtree(run / "snapshots" / name)
    with sqlite3.connect(run / "journal" / "tape.sqlite") as tape:
        (last,) = tape.execute("SELECT max(number) FROM event").fetchone()
        tape.execute("UPDATE event SET at_s = at_s + 1 WHERE number = ?", (last - 3,))
    disk = FullDisk()
    disk.commits_left = 1  # The cut.
    with pytest.raises(RunDirectoryError), RunDirectory(run, disk) as directory:
        recover(directory, keep_journal=True, take_over=False)
    with sqlite3.connect(run / "journal" / "tape.sqlite") as tape:
        assert tape.execute("SELECT max(number) FROM event").fetchone() == (last - 4,)
    for _ in range(2):
        with RunDirectory(run, SamePlace()) as directory:
            found = recover(directory, keep_journal=True, take_over=False)
            found.journal.close()
        assert found.state.epoch == 2, "once, and not again at the next start"


@pytest.mark.parametrize("place", [0.2, 0.6, 0.85])
def test_a_log_with_a_hole_begins_a_new_epoch(served: Path, tmp_path: Path, place: float) -> None:
    """What sqlite had not yet taken out of its log when the server was killed."""
    killed = tmp_path / "killed"
    with OuterServer(shutil.copytree(served, tmp_path / "run"), disk=SamePlace()) as server:
        for _ in range(40):
            Learner(server, "z")
        crashed(tmp_path / "run", killed)
        generation = server.state.generation
    log = killed / "journal" / "tape.sqlite-wal"
    data = bytearray(log.read_bytes())
    whole = shutil.copytree(killed, tmp_path / "whole")
    data[int(len(data) * place)] ^= 1
    log.write_bytes(data)
    for run, epoch in ((killed, 2), (whole, 1)):
        with RunDirectory(run, SamePlace()) as directory:
            found = recover(directory, keep_journal=True, take_over=False)
            found.journal.close()
        assert (found.state.epoch, bool(found.reason)) == (epoch, epoch == 2)
        assert found.state.generation > generation


def test_a_start_that_is_refused_leaves_a_hole_to_the_next(served: Path, tmp_path: Path) -> None:
    """A disk that takes nothing when the log was found damaged, and has room at the next start."""
    run = tmp_path / "killed"
    with OuterServer(shutil.copytree(served, tmp_path / "run"), disk=SamePlace()) as server:
        for _ in range(40):
            Learner(server, "z")
        crashed(tmp_path / "run", run)
    log = run / "journal" / "tape.sqlite-wal"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    for kept in range(3):
        disk = FullDisk()
        disk.commits_left = kept
        disk.is_full = kept == 0
        with suppress(RunDirectoryError), RunDirectory(run, disk) as directory:
            recover(directory, keep_journal=True, take_over=False).journal.close()
    with RunDirectory(run, SamePlace()) as directory:
        found = recover(directory, keep_journal=True, take_over=False)
        found.journal.close()
    assert found.state.epoch == 2


@pytest.mark.parametrize("what", ["no directory", "no tape", "an empty tape"])
def test_a_journal_that_is_gone_is_not_passed_over(served: Path, tmp_path: Path, what: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(served, run)
    if what == "no directory":
        shutil.rmtree(run / "journal")
    else:
        (run / "journal" / "tape.sqlite").unlink()
    if what == "an empty tape":
        (run / "journal" / "tape.sqlite").touch()
    record = (run / "server.json").read_bytes()
    for _ in range(2):
        with pytest.raises(RunDirectoryError, match=r"is missing or empty.*--take-over"):
            OuterServer(run, disk=SamePlace()).__enter__()
        assert (run / "server.json").read_bytes() == record
    with RunDirectory(run, SamePlace()) as directory:
        found = recover(directory, keep_journal=True, take_over=True)
        found.journal.close()
    assert found.state.epoch == 2
    assert "how many events are missing nobody can tell" in found.reason


def test_what_this_machine_computes_otherwise_is_served_as_it_is(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tape from a processor that rounds otherwise: a new epoch, with digests of what is held."""
    run = tmp_path / "run"
    shutil.copytree(served, run)
    for name in sorted(path.name for path in (run / "snapshots").iterdir())[1:]:
        shutil.rmtree(run / "snapshots" / name)

    def otherwise(*args: Any, **settings: Any) -> Any:
        return merged(*args, **settings) * np.float32(1 + 2**-7)

    monkeypatch.setattr(parameters, "merge", otherwise)
    for start in (1, 2, 3, 4):
        with OuterServer(run, disk=SamePlace()) as server:
            assert server.status().epoch == 2, f"at start {start}"
            learner = Learner(server, "z")
            for index, fragment in enumerate(server.state.fragments):
                (full,) = server.updates(learner.lease, index, None)
                part = server._directory.layout.fragments[index]
                rows = server._directory.layout.rows_padded
                value = decode_f32(part, rows, full.payload)
                assert digest_hex(jnp.asarray(value)) == full.digest == fragment.digest
    assert history.replay(run).differences == ()


def test_a_learner_that_holds_more_than_was_kept_begins_a_new_epoch(run: Path) -> None:
    """The journal lost its end, which nothing on the disk tells."""
    with OuterServer(run, disk=SamePlace()) as server:
        a, b = Learner(server, "a"), Learner(server, "b")
        a.push(fragment=0)
        digests = [fragment.digest for fragment in server.state.fragments]
        server.adopted(b.lease, Adopted(0, Version(1, 3), "of another life", 1))
        assert a.lost.wait(WAIT_S)
        assert b.lost.wait(WAIT_S)
        status = server.status()
        assert status.epoch == 2
        assert [fragment.digest for fragment in server.state.fragments] == digests
        with pytest.raises(RefusedError):
            server.report(a.lease, Report(2, 32, 2))
        again = [Learner(server, "a"), Learner(server, "b")]
        (full,) = server.updates(again[0].lease, 0, None)
        assert (full.version, full.digest) == (Version(2, 0), digests[0])
        # What was acknowledged has come along, and does not count twice.
        (waiting,) = server.state.fragments[0].arrived
        assert waiting.key == ContributionKey("a", 0, Version(2, 0))
        with pytest.raises(RefusedError, match="consumed already"):
            again[0].push(fragment=0, seed=1)
        again[1].push(fragment=0)
        for step in range(2, 40):
            for learner in again:
                server.report(learner.lease, Report(step, 16 * step, step))
            if again[0].published.acquire(timeout=0.5):
                break
        assert server.status().rounds_merged >= 1
        versions = [fragment.version for fragment in server.state.fragments]
        killed = crashed(run, run.parent / "killed")
    for left in (run, killed):
        assert history.replay(left).differences == ()
        account = history.data_account(left)
        assert {each.learner for each in account.merged if each.fragment == 0} == {"a", "b"}
        assert account.overlaps == ()
        with OuterServer(left, disk=SamePlace()) as server:
            assert server.status().epoch == 2
            assert [fragment.version for fragment in server.state.fragments] >= versions


@pytest.mark.parametrize("victim", ["weights.safetensors", "manifest.json"])
def test_a_replay_names_damaged_snapshots(served: Path, tmp_path: Path, victim: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(served, run)
    path = max((run / "snapshots").iterdir()) / victim
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (sentence,) = history.replay(run).damaged_snapshots
    assert f"snapshot {path.parent.name} is damaged: {victim}" in sentence
    assert history.replay(served).damaged_snapshots == ()


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


class FullDisk(SamePlace):
    """A disk without room while `is_full`; which takes no commits after so many more."""

    is_full = False
    commits_left: int | None = None

    def open(self, path: Path) -> Any:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().open(path)

    def commit(self, database: sqlite3.Connection) -> None:
        if self.commits_left:
            self.commits_left -= 1
        elif self.commits_left == 0 or self.is_full:
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
        assert "journal" in server.status().stalled
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
        assert status.stalled == ""
        assert [learner.contributions_merged for learner in status.learners] == [1, 1]
    assert history.replay(run).differences == ()


def test_a_server_that_is_stopped_while_its_disk_is_full_ends_in_order(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk()
    server = OuterServer(run, disk=disk)
    with server:
        a, b = Learner(server, "a"), Learner(server, "b")
        disk.is_full = True
        for step in range(2, 30):
            for learner in (a, b):
                server.report(learner.lease, Report(step, 16 * step, step))
        shut = server._engine._merger.shutdown

        def shut_and_make_room(*, wait: bool) -> None:
            """As late as can be: nobody merges any more, and rounds open and close again."""
            shut(wait=wait)
            disk.is_full = False
            for learner in (a, b):
                for fragment in (0, 1):
                    with suppress(StorageError):
                        learner.push(fragment=fragment)

        monkeypatch.setattr(server._engine._merger, "shutdown", shut_and_make_room)
    assert not server.failed
    assert history.replay(run).differences == ()
    with OuterServer(run, disk=disk) as server:
        assert (server.status().epoch, server.status().rounds_merged) == (1, 0)


def test_a_rollback_that_the_disk_refused_keeps_nothing_for_it(run: Path) -> None:
    disk = FullDisk()
    with OuterServer(run, disk=disk) as server:
        disk.commits_left = 0
        with pytest.raises(StorageError, match="room"):
            server.admin.roll_back("000000", None, "a test")
        disk.commits_left = None
        for _ in range(5):
            server.admin.snapshot()
        names = sorted(path.name for path in (run / "snapshots").iterdir())
    assert names == ["000003", "000004", "000005"]


def test_what_nobody_was_told_of_is_durable_within_a_second_or_so(run: Path) -> None:
    synced = threading.Event()

    class Watched(SamePlace):
        is_watched = False

        def commit(self, database: sqlite3.Connection) -> None:
            super().commit(database)
            (level,) = database.execute("PRAGMA synchronous").fetchone()
            if self.is_watched and level == FULL:
                synced.set()

    disk = Watched()
    with OuterServer(run, disk=disk) as server:
        learner = Learner(server, "a")
        disk.is_watched = True
        server.report(learner.lease, Report(2, 32, 2))
        assert synced.wait(WAIT_S), "with nothing else that happens"


def test_an_account_says_where_it_begins(tmp_path: Path) -> None:
    story = Story(tmp_path, keep_journal=True)
    story.live(24, "1")
    found = history.data_account(story.run)
    begins = dict(found.begins)
    assert begins
    for gap in found.gaps:
        assert gap.start >= begins[gap.shard] - 2, "what was merged before is no gap"
    assert all(each.stop > begins[each.shard] - 2 for each in found.merged)


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
