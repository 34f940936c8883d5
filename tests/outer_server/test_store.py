"""Run directories and snapshots: whole or not at all, locked, readable without this program."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fragments.errors import RunDirectoryError
from fragments.records import Hello, Report, Role
from fragments.sealed import seal, unseal
from outer_server.core.events import Started
from outer_server.history import events
from outer_server.server import OuterServer
from outer_server.store.rundir import RunDirectory, create_run, read_run
from outer_server.store.snapshot import numbered
from tests.support.crash import SamePlace, crashed
from tests.support.tiny import tiny_birth, tiny_spec


@pytest.fixture
def run(tmp_path: Path) -> Path:
    spec = tiny_spec()
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    return tmp_path / "run"


def test_a_new_run_holds_its_settings_layout_and_weights(run: Path) -> None:
    spec, layout = read_run(run)
    assert spec == tiny_spec()
    weights = load_file(run / "snapshots" / "000000" / "weights.safetensors")
    assert {name: value.shape for name, value in weights.items()} == {"['b']": (1,), "['w']": (8,)}
    assert all(value.dtype == np.float32 for value in weights.values())
    assert [f.num_values for f in layout.fragments] == [8, 1]


def test_an_existing_directory_is_never_overwritten(run: Path) -> None:
    before = sorted(run.rglob("*"))
    spec = tiny_spec()
    with pytest.raises(RunDirectoryError, match="exists already"):
        create_run(run, spec, *tiny_birth(spec))
    assert sorted(run.rglob("*")) == before


def test_one_server_at_a_time(run: Path) -> None:
    with RunDirectory(run), pytest.raises(RunDirectoryError, match="in use"), RunDirectory(run):
        pass
    with RunDirectory(run):
        pass


def test_the_generation_rises_with_every_start(run: Path) -> None:
    found = []
    for _ in range(2):
        with OuterServer(run) as server:
            found.append((server.status().generation, server.status().epoch))
    assert found == [(1, 1), (2, 1)]


def test_what_is_not_a_run_directory_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="diloco init"):
        read_run(tmp_path)


def test_another_format_is_refused(run: Path) -> None:
    document = unseal((run / "run.json").read_bytes())
    (run / "run.json").write_bytes(seal(document | {"format": 2}))
    with pytest.raises(RunDirectoryError, match="format 2"):
        read_run(run)


def test_settings_that_were_edited_are_refused_with_what_to_do(run: Path) -> None:
    text = (run / "run.json").read_text()
    assert '"momentum": 0.8' in text
    (run / "run.json").write_text(text.replace('"momentum": 0.8', '"momentum": 0.0'))
    with pytest.raises(RunDirectoryError, match=r"not what was written .*from a backup"):
        read_run(run)


@pytest.mark.parametrize("left", [None, b"", b"{", b"[]"])
def test_a_lost_record_of_the_server_costs_an_epoch_and_no_run(
    run: Path, left: bytes | None
) -> None:
    with OuterServer(run) as server:
        generation = server.status().generation
    if left is None:
        (run / "server.json").unlink()
    else:
        (run / "server.json").write_bytes(left)
    with pytest.raises(RunDirectoryError, match="--take-over"), OuterServer(run):
        pass
    with OuterServer(run, take_over=True) as server:
        assert server.status().epoch == 2
        assert server.status().generation > generation
    (*_, reason) = [event.reason for each in events(run)
                    if isinstance(event := each.record.event, Started)]  # fmt: skip
    assert reason.startswith("server.json, where the last server noted how it ended, is missing")


@pytest.mark.parametrize("name", ["run.json", "layout.json"])
def test_a_damaged_directory_is_refused_with_its_path(run: Path, name: str) -> None:
    (run / name).write_bytes(b"\xff{")
    with pytest.raises(RunDirectoryError, match="run"):
        read_run(run)


def test_an_orderly_stop_and_start_keeps_epoch_and_digests(run: Path) -> None:
    with OuterServer(run) as server:
        before = server.status()
    with OuterServer(run) as server:
        after = server.status()
    assert (before.generation, after.generation) == (1, 2)
    assert after.epoch == before.epoch == 1
    assert after.weights_digest == before.weights_digest


def test_without_a_journal_an_unclean_stop_begins_a_new_epoch(run: Path, tmp_path: Path) -> None:
    epochs = []
    for life in range(3):
        with OuterServer(run, keep_journal=False, disk=SamePlace()) as server:
            epochs.append(server.status().epoch)
            run = crashed(run, tmp_path / f"crashed{life}")
    assert epochs == [1, 2, 3], "none is ever served twice"


def test_a_journal_begins_where_none_was_kept(run: Path, tmp_path: Path) -> None:
    with OuterServer(run, keep_journal=False, disk=SamePlace()) as server:
        _train(server, "a", 1)
    with OuterServer(run, disk=SamePlace()) as server:
        _train(server, "b", 2)
        crashed(run, tmp_path / "crashed")
    with OuterServer(tmp_path / "crashed", disk=SamePlace()) as server:
        assert (server.status().epoch, server.status().generation) == (1, 3)
        assert {learner.name for learner in server.status().learners} == {"a", "b"}


def _train(server: OuterServer, name: str, step: int) -> None:
    digest = server.describe().layout_digest
    lease = server.join(Hello(1, "tiny", digest, name, Role.LEARNER, name)).lease
    server.report(lease, Report(step, 16 * step, step))
    server.leave(lease, "done")


@pytest.mark.parametrize(
    "victim", ["weights.safetensors", "server.safetensors", "state.json", "manifest.json"]
)
def test_a_damaged_newest_snapshot_loses_nothing(run: Path, victim: str) -> None:
    with OuterServer(run) as server:
        digests = [fragment.digest for fragment in server.status().fragments]
    newest = numbered(run / "snapshots")[-1] / victim
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 0x55
    newest.write_bytes(bytes(data))
    with OuterServer(run) as server:
        status = server.status()
    assert [fragment.digest for fragment in status.fragments] == digests
    assert (status.epoch, status.generation) == (1, 2)


@pytest.mark.parametrize("keep_journal", [True, False])
def test_a_removed_newest_snapshot_costs_an_epoch_only_without_a_journal(
    run: Path, keep_journal: bool
) -> None:
    with OuterServer(run, keep_journal=keep_journal) as server:
        assert server.status().epoch == 1
    shutil.rmtree(numbered(run / "snapshots")[-1])
    with OuterServer(run, keep_journal=keep_journal) as server:
        assert server.status().epoch == (1 if keep_journal else 2)


def test_a_run_of_a_program_that_kept_no_journal_goes_on(run: Path) -> None:
    with OuterServer(run, keep_journal=False):
        pass
    record = {"generation": 1, "epoch": 1, "clean": True}
    (run / "server.json").write_text(json.dumps(record))
    with OuterServer(run) as server:
        assert (server.status().generation, server.status().epoch) == (2, 1)


def test_a_copy_is_served_only_when_told_so_and_in_a_new_epoch(run: Path, tmp_path: Path) -> None:
    with OuterServer(run) as server:
        first = server.status()
    copy = crashed(run, tmp_path / "copy")
    with pytest.raises(RunDirectoryError, match="--take-over"), OuterServer(copy):
        pass
    with OuterServer(copy, take_over=True) as server:
        assert server.status().epoch == 2
        assert server.status().generation > first.generation + 100
    with OuterServer(copy) as server:
        assert server.status().epoch == 2, "it is at home now"


def test_a_loss_that_is_not_finite_survives_a_restart(run: Path) -> None:
    with OuterServer(run) as server:
        hello = Hello(1, "tiny", server.describe().layout_digest, "a", Role.LEARNER, "1")
        lease = server.join(hello).lease
        server.report(lease, Report(1, 16, 1, loss=float("nan"), step_s=float("inf")))
        server.leave(lease, "done")
    with OuterServer(run) as server:
        (learner,) = server.status().learners
        assert server.status().epoch == 1
    assert math.isnan(learner.loss)
    assert (learner.steps, learner.step_s) == (1, 0.0)


def test_without_any_whole_snapshot_the_server_says_so(run: Path) -> None:
    (run / "snapshots" / "000000" / "manifest.json").unlink()
    with pytest.raises(RunDirectoryError, match="no usable snapshot"), OuterServer(run):
        pass
    # The failed start holds no lock.
    with RunDirectory(run):
        pass


def test_old_snapshots_are_removed(run: Path) -> None:
    for _ in range(5):
        with OuterServer(run):
            pass
    assert [path.name for path in numbered(run / "snapshots")] == ["000003", "000004", "000005"]


@pytest.mark.parametrize("name", ["run.json", "layout.json", "server.json"])
def test_what_cannot_be_read_for_the_moment_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spec = tiny_spec()
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    read = Path.read_bytes

    def forbidden(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", forbidden)
        with (
            pytest.raises(RunDirectoryError, match=rf"{name} cannot be read: Permission denied"),
            RunDirectory(tmp_path / "run") as directory,
        ):
            directory.record()
    with RunDirectory(tmp_path / "run") as directory:
        assert directory.record().epoch == 1
