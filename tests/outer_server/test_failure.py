"""A fault of the engine is said aloud and leaves the last good snapshot alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from fragments.errors import BusyError
from fragments.records import Hello, Role
from outer_server import engine
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from outer_server.store.snapshot import numbered
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
        assert server.status().epoch == 2
