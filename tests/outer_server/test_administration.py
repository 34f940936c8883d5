"""What an operator does to a run that is served, and what a crash leaves of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fragments.errors import RefusedError, SettingsError, StorageError
from fragments.records import Hello, LearnerState, Phase, RefusalCode, Report, Role, RunStatus
from outer_server.history import events, replay
from outer_server.saver import SnapshotRule
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from outer_server.store.snapshot import KEPT, numbered
from tests.support.crash import SamePlace, crashed
from tests.support.direct import DirectLink
from tests.support.tiny import tiny_birth, tiny_spec
from tests.support.trained import training, until

NEVER = SnapshotRule(every_rounds=1 << 40, every_s=1e9)
"""Only those snapshots that are asked for: all else comes back from the tape."""


class FullDisk(SamePlace):
    """A disk that takes no snapshot while it is `full`."""

    full = False

    def rename(self, old: Path, new: Path) -> None:
        if self.full and new.parent.name == "snapshots":
            raise OSError(28, "No space left on device")
        super().rename(old, new)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    spec = tiny_spec(budget_tokens=16 * 100_000, max_learners=4)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    return tmp_path / "run"


def _served(path: Path, disk: SamePlace | None = None) -> OuterServer:
    return OuterServer(path, NEVER, disk=disk or SamePlace())


@contextmanager
def _after_crash(server: OuterServer, run: Path, to: Path) -> Iterator[tuple[RunStatus, RunStatus]]:
    """The status of a drained run, and that of the server which comes back after a crash now."""
    until(lambda: not any(fragment.open for fragment in server.status().fragments), "open rounds")
    before = server.status()
    with _served(crashed(run, to)) as again:
        yield before, again.status()


def _rounds(server: OuterServer, more: int) -> None:
    before = server.status().rounds_merged
    until(lambda: server.status().rounds_merged >= before + more, "rounds")


def _hello(server: OuterServer, name: str) -> Hello:
    return Hello(1, "tiny", server.describe().layout_digest, name, Role.LEARNER, name)


def test_settings_of_the_outer_step_are_kept_over_a_crash_to_the_bit(
    run: Path, tmp_path: Path
) -> None:
    with _served(run) as server, training(lambda: DirectLink(server), "a", "b"):
        _rounds(server, 6)
        server.admin.change((("outer.learning_rate", "0.125"), ("merge", "average")), "")
        _rounds(server, 6)
        server.admin.change((("outer.momentum", "0.25"), ("outer.nesterov", "false")), "")
        _rounds(server, 6)
        server.admin.drain("to look")
        with _after_crash(server, run, tmp_path / "crashed") as (before, after):
            assert after.weights_digest == before.weights_digest
            assert (after.epoch, after.phase) == (1, Phase.DRAINING)
            assert "(to look)" in after.phase_reason
            assert after.rounds_merged == before.rounds_merged >= 18
    again = replay(run)
    assert (again.differences, again.damage) == ((), "")
    assert again.merges >= 18
    with _served(run) as server:
        spec = server.state.spec
        assert (spec.outer.learning_rate, spec.outer.momentum, spec.merge) == (
            0.125,
            0.25,
            "average",
        )
        assert '"learning_rate":0.125' in server.describe().run_spec_json


def test_momentum_neither_comes_nor_goes_in_mid_run(run: Path) -> None:
    with _served(run) as server:
        with pytest.raises(SettingsError, match="no momentum has none"):
            server.admin.change((("outer.momentum", "0"),), "")
        assert server.state.spec.outer.momentum == 0.8


def test_an_eviction_is_kept_over_a_crash(run: Path, tmp_path: Path) -> None:
    with _served(run) as server:
        lease = server.join(_hello(server, "a")).lease
        server.admin.evict("a", "why not", None, drop=False)
        with pytest.raises(RefusedError) as refused:
            server.report(lease, Report(1, 16, 1))
        assert refused.value.code is RefusalCode.EVICTED
        crashed(run, tmp_path / "crashed")
    with _served(tmp_path / "crashed") as server:
        assert server.status().learners[0].state is LearnerState.EVICTED
        with pytest.raises(RefusedError, match="why not"):
            server.join(_hello(server, "a"))
        server.admin.release("a", "")
        crashed(tmp_path / "crashed", tmp_path / "again")
    with _served(tmp_path / "again") as server:
        server.join(_hello(server, "a"))


def test_a_snapshot_is_there_when_its_name_is_said(run: Path, tmp_path: Path) -> None:
    disk = FullDisk()
    with _served(run, disk) as server:
        answered = server.admin.snapshot()
        assert (run / "snapshots" / answered.snapshot / "manifest.json").is_file()
        disk.full = True
        with pytest.raises(StorageError, match="log"):
            server.admin.snapshot()
        disk.full = False
        assert server.admin.snapshot().snapshot > answered.snapshot


@pytest.mark.parametrize("has_fresh_snapshot", [True, False])
def test_a_rollback_is_kept_over_a_crash_and_trained_on_from(
    run: Path, tmp_path: Path, has_fresh_snapshot: bool
) -> None:
    disk = FullDisk()
    with _served(run, disk) as server, training(lambda: DirectLink(server), "a", "b"):
        _rounds(server, 6)
        server.admin.drain("")
        until(lambda: not server.state.open_rounds)
        old = server.admin.snapshot().snapshot
        point = server.status()
        server.admin.release(None, "")
        _rounds(server, 6)
        disk.full = not has_fresh_snapshot
        answered = server.admin.roll_back(old.lstrip("0"), None, "a spike")
        assert (answered.snapshot, server.status().epoch) == (old, 2)
        # Learners join again by themselves and train on from there.
        _rounds(server, 6)
        if has_fresh_snapshot:
            until(lambda: len(numbered(run / "snapshots")) >= 3)
        server.admin.drain("")
        with _after_crash(server, run, tmp_path / "crashed") as (before, after):
            assert after.weights_digest == before.weights_digest
            assert (after.epoch, after.generation) == (2, before.generation + 1)
            assert after.tokens_merged == before.tokens_merged
            assert [each.joins for each in after.learners] == [2, 2]
        disk.full = False
        answered = server.admin.roll_back(old, None, "")
        status = server.status()
        versions = [(each.version, each.digest) for each in point.fragments]
        assert [(each.version, each.digest) for each in status.fragments] == versions
        assert status.tokens_merged == point.tokens_merged
        assert status.tokens_trained <= point.tokens_trained, "those trained before the snapshot"
        assert (status.epoch, status.rounds_merged) == (3, point.rounds_merged)
    again = replay(run)
    assert (again.differences, again.damage, again.state.epoch) == ((), "", 3)
    told = [note.what for happened in events(run) for note in happened.notes]
    assert told.count("rolled_back") == 2


def test_what_a_tape_goes_back_to_stays_until_no_tape_needs_it(run: Path) -> None:
    with _served(run) as server:
        old = server.admin.snapshot().snapshot
        for _ in range(KEPT - 1):
            server.admin.snapshot()
        server.admin.roll_back(old, None, "")
        server.admin.snapshot()
        assert (run / "snapshots" / old).is_dir(), "one that is kept is older than the rollback"
        names = [server.admin.snapshot().snapshot for _ in range(KEPT)]
        assert [path.name for path in numbered(run / "snapshots")] == names


def test_without_a_name_the_newest_that_no_rollback_left_behind_is_meant(run: Path) -> None:
    with _served(run) as server:
        first = server.admin.snapshot().snapshot
        second = server.admin.snapshot().snapshot
        assert server.admin.roll_back("", 0, "").snapshot == second
        assert server.admin.roll_back(first, None, "").snapshot == first
        # The one that is written after it may or may not be there yet.
        assert server.admin.roll_back("", None, "").snapshot != second
        with pytest.raises(SettingsError, match="there is no snapshot 77; there are 0000"):
            server.admin.roll_back("77", None, "")
        with pytest.raises(SettingsError, match=r"no snapshot \.\./\.\./x"):
            server.admin.roll_back("../../x", None, "")
        assert server.status().epoch == 4


def test_a_damaged_snapshot_is_not_gone_back_to(run: Path) -> None:
    with _served(run) as server:
        name = server.admin.snapshot().snapshot
        weights = run / "snapshots" / name / "weights.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(bytes(data))
        with pytest.raises(SettingsError, match="damaged"):
            server.admin.roll_back(name, None, "")
        assert server.status().epoch == 1


def test_an_epoch_that_a_lost_tape_has_begun_is_never_served_again(
    run: Path, tmp_path: Path
) -> None:
    disk = FullDisk()
    with _served(run, disk) as server:
        disk.full = True
        server.admin.roll_back("", None, "")
        assert server.status().epoch == 2
        crashed(run, tmp_path / "crashed")
        disk.full = False
    for path in (tmp_path / "crashed" / "journal").glob("tape.sqlite*"):
        path.unlink()
    with OuterServer(tmp_path / "crashed", NEVER, disk=SamePlace(), take_over=True) as server:
        assert server.status().epoch == 3


def test_the_reason_of_a_stop_is_told(run: Path) -> None:
    with _served(run) as server:
        assert server.admin.stop("new kernel").changed
        assert not server.admin.stop("").changed
        assert server.admin.stop_reason == "stopped by an operator (new kernel)"
    assert "new kernel" in server.state.phase_reason
