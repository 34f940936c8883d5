"""A fault of the engine is said aloud and leaves the last good snapshot alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from fragments.errors import BusyError, RunDirectoryError
from fragments.records import (
    Adopted,
    Decline,
    DeclineReason,
    Hello,
    Phase,
    Progress,
    Report,
    Role,
    ServerNote,
    Version,
)
from fragments.tensors import TensorWriter
from outer_server import engine
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from outer_server.store.snapshot import numbered
from tests.support.crash import SamePlace, crashed
from tests.support.tiny import tiny_birth, tiny_spec


def test_a_fault_ends_the_serving_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    spec = tiny_spec()
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with OuterServer(tmp_path / "run") as server:
        monkeypatch.setattr(engine, "handle", broken)
        with pytest.raises(BusyError):
            server.join(Hello(1, "tiny", server.describe().layout_digest, "a", Role.LEARNER, "1"))
        assert server.failed
        with pytest.raises(BusyError, match="has failed"):
            server.status()
    assert len(numbered(tmp_path / "run" / "snapshots")) == 1
    monkeypatch.undo()
    with OuterServer(tmp_path / "run") as server:
        assert server.status().epoch == 1, "what was heard of is on the tape"


def test_finished_is_on_disk_before_anybody_hears_of_it(tmp_path: Path) -> None:
    spec = tiny_spec(budget_tokens=16)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    heard: list[Phase] = []
    on_disk: list[int] = []
    over = threading.Event()

    def sink(note: ServerNote) -> None:
        if isinstance(note, Progress) and note.phase is Phase.FINISHED:
            on_disk.append(len(numbered(tmp_path / "run" / "snapshots")))
            heard.append(note.phase)
            over.set()

    with OuterServer(tmp_path / "run", disk=SamePlace()) as server:
        hello = Hello(1, "tiny", server.describe().layout_digest, "a", Role.LEARNER, "1")
        lease = server.join(hello).lease
        server.attach(lease, sink)
        for p, fragment in enumerate(server.status().fragments):
            server.adopted(lease, Adopted(p, Version(1, 0), fragment.digest, 0))
        server.report(lease, Report(1, 16, 1))
        for p in range(2):
            decline = Decline(p, Version(1, 0), DeclineReason.NOT_FINITE)
            server.decline(lease, decline)
        assert over.wait(20)
        # What a crash at this very moment would find.
        crashed(tmp_path / "run", tmp_path / "crashed")
    assert on_disk[0] == 2
    with OuterServer(tmp_path / "crashed", disk=SamePlace()) as server:
        assert server.status().phase is Phase.FINISHED


def test_a_snapshot_that_cannot_be_written_says_so_and_leaves_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    spec = tiny_spec()
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with (
        pytest.raises(RunDirectoryError, match="room"),
        OuterServer(tmp_path / "run", keep_journal=False),
    ):
        monkeypatch.setattr(TensorWriter, "write", full)
    # One that another test has used may hold on to what it was configured with.
    monkeypatch.setattr(engine, "_log", structlog.get_logger())
    with capture_logs() as logs, OuterServer(tmp_path / "run", take_over=True):
        monkeypatch.setattr(TensorWriter, "write", full)
    (failed,) = (entry for entry in logs if entry["event"] == "snapshot_failed")
    assert "room" in failed["reason"]
    assert failed["kept"] == "the journal has it all"
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir()] == ["000000"]
    monkeypatch.undo()
    with OuterServer(tmp_path / "run") as server:
        assert server.status().epoch == 2, "the one that take_over began"


def test_what_is_no_snapshot_to_go_on_from_is_no_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object, **__: object) -> None:
        raise ValueError("a state that cannot be read back")

    spec = tiny_spec()
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with (
        pytest.raises(RunDirectoryError, match="cannot be read back"),
        OuterServer(tmp_path / "run"),
    ):
        monkeypatch.setattr(TensorWriter, "write", unreadable)
