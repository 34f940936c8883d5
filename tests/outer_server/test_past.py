"""A run's past is read: nothing of it is changed, and what is damaged is told and passed over."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from fragments.errors import RunDirectoryError
from outer_server import history
from outer_server.saver import SnapshotRule
from outer_server.server import OuterServer
from outer_server.store import lock
from outer_server.store.lock import InUseError, check_unused
from outer_server.store.rundir import RunDirectory, create_run
from tests.support.crash import SamePlace, crashed
from tests.support.story import Story
from tests.support.tiny import tiny_birth, tiny_spec


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was served twice; do not change it."""
    story = Story(tmp_path_factory.mktemp("served"), keep_journal=True)
    story.live(7, "1")
    story.live(4, "2")
    return story.run


def _tree(run: Path) -> dict[Path, tuple[int, bytes]]:
    """Every name in a directory, with its time of change and contents."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(run.rglob("*"))
    }


def test_reading_changes_nothing_of_what_a_killed_server_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    create_run(run, tiny_spec(), *tiny_birth(tiny_spec()))
    with OuterServer(run, SnapshotRule(), disk=SamePlace()):
        left = crashed(run, tmp_path / "left")
    assert (left / "journal" / "tape.sqlite-wal").stat().st_size > 0
    before = _tree(left)
    told = list(history.events(left))
    assert type(told[0].record.event).__name__ == "Started"
    assert history.replay(left).events == len(told)
    assert history.newest(left).events == len(told)
    history.data_account(left)
    assert _tree(left) == before


def test_a_hole_in_the_log_is_still_found_by_a_server_after_somebody_has_read_it(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    create_run(run, tiny_spec(), *tiny_birth(tiny_spec()))
    with OuterServer(run, disk=SamePlace()) as server:
        for _ in range(3):
            server.admin.drain("a test")
            server.admin.release(None, "a test")
        left = crashed(run, tmp_path / "left")
    log = left / "journal" / "tape.sqlite-wal"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    holes: list[history.Hole] = []
    for _ in range(2):
        list(history.events(left, holes.append))
    assert [hole.until for hole in holes] == [None, None]
    assert "not what was written" in history.replay(left).damage
    with OuterServer(left, disk=SamePlace()) as server:
        assert server.status().epoch == 2


def test_a_run_that_is_served_can_be_read_and_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    create_run(run, tiny_spec(), *tiny_birth(tiny_spec()))
    check_unused(run)
    with OuterServer(run):
        assert list(history.events(run))
        with pytest.raises(InUseError, match="in use by a server: stop"):
            history.replay(run)
        (run / "address.json").write_text('{"address": "127.0.0.1:7", "pid": 12}')
        with pytest.raises(InUseError, match=r"by a server at 127\.0\.0\.1:7 \(process 12\)"):
            check_unused(run)
    check_unused(run)
    monkeypatch.setattr(lock, "READERS_S", 0.3)
    with RunDirectory(run, only_reads=True), RunDirectory(run, only_reads=True):
        # They will be done soon, so a server waits for them; and not for ever.
        check_unused(run)
        with pytest.raises(InUseError, match="`diloco events` or `diloco export`: wait"):
            OuterServer(run).__enter__()
        assert list(history.events(run))
    monkeypatch.setattr(lock, "READERS_S", 30.0)
    reader = RunDirectory(run, only_reads=True)
    reader.__enter__()
    ending = threading.Timer(0.3, reader.__exit__, (None, None, None))
    ending.start()
    with OuterServer(run) as server:
        assert server.status().rounds_merged == 0
    ending.join()


def _damaged(served: Path, run: Path, damage: str, *values: int) -> Path:
    """A copy of a run, to whose tape something was done."""
    shutil.copytree(served, run)
    with sqlite3.connect(run / "journal" / "tape.sqlite") as tape:
        tape.execute(damage, values)
    return run


def _positions(run: Path) -> list[int]:
    """Where on the tape the snapshots were taken, oldest first."""
    with RunDirectory(run, only_reads=True) as directory:
        return [each.position or 0 for each in directory.known()]


def test_events_and_replay_go_on_after_what_is_damaged(served: Path, tmp_path: Path) -> None:
    first, second, *_ = _positions(served)
    number = (first + second) // 2
    run = _damaged(
        served, tmp_path / "run", "UPDATE event SET at_s = at_s + 1 WHERE number = ?", number
    )
    holes: list[history.Hole] = []
    told = list(history.events(run, holes.append))
    (hole,) = holes
    assert (hole.first, hole.until, hole.is_covered, hole.is_lost) == (
        number,
        number + 1,
        True,
        False,
    )
    assert "the run is whole" in hole.meaning
    all_told = [each.record.number for each in history.events(served)]
    assert [each.record.number for each in told] == [n for n in all_told if n != number]
    bare = [each.record.number for each in told if each.is_bare]
    assert bare == [n for n in all_told if number < n <= second]
    assert told[-1].state == list(history.events(served))[-1].state
    found = history.replay(run)
    assert "does not match its checksum" in found.damage
    assert found.differences == ()
    assert found.state == history.replay(served).state
    account = history.data_account(run)
    assert account.begins
    assert (account.overlaps, account.miscounts) == ((), ())


def test_damage_after_the_newest_snapshot_is_no_small_matter(served: Path, tmp_path: Path) -> None:
    last = list(history.events(served))[-1].record.number
    run = _damaged(served, tmp_path / "run", "DELETE FROM event WHERE number = ?", last)
    for name in sorted(path.name for path in (run / "snapshots").iterdir())[1:]:
        shutil.rmtree(run / "snapshots" / name)
    (only,) = _positions(run)
    with sqlite3.connect(run / "journal" / "tape.sqlite") as tape:
        tape.execute("UPDATE event SET body = '{' WHERE number = ?", (only + 2,))
    holes: list[history.Hole] = []
    told = list(history.events(run, holes.append))
    assert [each.is_bare for each in told] == [False] + [True] * (last - only - 3)
    assert (holes[0].first, holes[0].goes_on) == (only + 2, None)
    assert "cuts the journal there" in holes[0].meaning
    with pytest.raises(RunDirectoryError, match="cuts the journal there"):
        list(history.events(run))
    with pytest.raises(RunDirectoryError, match="cuts the journal there"):
        history.data_account(run)


def test_a_tape_that_was_lost_and_begun_anew_is_told_from_where_it_begins(
    served: Path, tmp_path: Path
) -> None:
    *_, middle, _ = _positions(served)
    run = _damaged(served, tmp_path / "run", "DELETE FROM event WHERE number <= ?", middle)
    holes: list[history.Hole] = []
    told = list(history.events(run, holes.append))
    assert not any(each.is_bare for each in told)
    assert told[0].record.number == middle + 1
    (hole,) = holes
    assert (hole.is_lost, hole.is_covered) == (True, True)
    assert f"the journal begins at event {middle + 1}" in str(hole)
    assert history.replay(run).state == history.replay(served).state


@pytest.mark.parametrize("what", ["snapshots", "journal"])
def test_what_is_missing_is_named(served: Path, tmp_path: Path, what: str) -> None:
    run = Path(shutil.copytree(served, tmp_path / "run"))
    if what == "snapshots":
        for path in (run / "snapshots").iterdir():
            shutil.rmtree(path)
        sentence = "no whole snapshot.*put one back from a backup"
    else:
        (run / "journal" / "tape.sqlite").unlink()
        sentence = r"tape\.sqlite is missing"
    for read in (history.replay, lambda run: list(history.events(run))):
        with pytest.raises(RunDirectoryError, match=sentence):
            read(run)
