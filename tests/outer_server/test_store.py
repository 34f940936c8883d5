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
from outer_server.server import OuterServer
from outer_server.store.rundir import RunDirectory, create_run, read_run
from outer_server.store.snapshot import numbered
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
    with RunDirectory(run) as directory:
        first = directory.start()
        second = directory.start()
    assert (first.generation, first.epoch) == (1, 1)
    assert (second.generation, second.epoch) == (2, 2), "the first did not stop in order"


def test_what_is_not_a_run_directory_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="diloco init"):
        read_run(tmp_path)


def test_another_format_is_refused(run: Path) -> None:
    document = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(document | {"format": 2}))
    with pytest.raises(RunDirectoryError, match="format 2"):
        read_run(run)


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


def test_after_an_unclean_stop_a_new_epoch_begins(run: Path) -> None:
    with RunDirectory(run) as directory:
        directory.start()  # a server that dies here leaves no "clean" behind
    with OuterServer(run) as server:
        assert server.status().epoch == 2


@pytest.mark.parametrize(
    "victim", ["weights.safetensors", "server.safetensors", "state.json", "manifest.json"]
)
def test_a_damaged_newest_snapshot_is_passed_over_in_a_new_epoch(run: Path, victim: str) -> None:
    with OuterServer(run) as server:
        digests = [fragment.digest for fragment in server.status().fragments]
    newest = numbered(run / "snapshots")[-1] / victim
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 0x55
    newest.write_bytes(bytes(data))
    with OuterServer(run) as server:
        status = server.status()
    assert [fragment.digest for fragment in status.fragments] == digests
    assert status.epoch == 2


def test_a_removed_newest_snapshot_begins_a_new_epoch(run: Path) -> None:
    with OuterServer(run) as server:
        assert server.status().epoch == 1
    shutil.rmtree(numbered(run / "snapshots")[-1])
    with OuterServer(run) as server:
        assert server.status().epoch == 2


def test_a_run_of_a_program_that_named_no_snapshot_goes_on(run: Path) -> None:
    record = json.loads((run / "server.json").read_bytes())
    del record["snapshot"]
    (run / "server.json").write_text(json.dumps(record))
    with OuterServer(run) as server:
        assert server.status().epoch == 1


def test_an_epoch_is_never_served_twice(run: Path) -> None:
    epochs = []
    for _ in range(3):
        with RunDirectory(run) as directory:
            epochs.append(directory.start().epoch)  # dies before its first snapshot
    assert epochs == [1, 2, 3]


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
