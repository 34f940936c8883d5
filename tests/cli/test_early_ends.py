"""What ends before it has begun: stopped while building, too late for the run, or on other data."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli.main import main
from harness.environment import child_environment, command
from outer_server.store.rundir import create_run
from tests.cli.test_members import FACTORY, served
from tests.support.tiny import tiny_birth, tiny_spec


def _stopped_while_building(*words: str) -> tuple[int, str, str, float]:
    process = subprocess.Popen(
        command(*words),
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGTERM)
    began_s = time.monotonic()
    out, error = process.communicate(timeout=20)
    return process.returncode, out, error, time.monotonic() - began_s


def test_init_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("init", str(run), "--program.factory", "tests.cli.factories:endless")
    code, out, error, took_s = _stopped_while_building(*words)
    assert (code, out, error) == (130, "", "diloco: stopped before it was done\n")
    assert took_s < 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("learn", "--name", "a"), "a: stopped before it had joined\n"),
        (("evaluate",), "evaluator: stopped before its evaluation was done\n"),
    ],
)
def test_who_is_stopped_while_building_ends_well(
    tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    spec = tiny_spec(program={"factory": "tests.cli.factories:endless"})
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with served(tmp_path / "run") as (address, _):
        code, out, _, took_s = _stopped_while_building(*words, "--address", address)
    assert (code, out) == (0, line)
    assert took_s < 2


def test_other_data_is_refused_unless_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factory = ["--program.factory", "tests.cli.factories:on_data"]
    run = tmp_path / "run"
    small = ["--fragments", "2", "--codec.block", "8", "--budget-tokens", "160"]
    assert main(["init", str(run), *factory, *small, "--data", "here"]) == 0
    with served(run) as (address, _):
        words = ["learn", "--name", "a", "--address", address, "--data", "there"]
        assert main(words) == 2
        refused = capsys.readouterr().err.splitlines()[-1]
        assert "digest of there" in refused
        assert "digest of here" in refused
        assert "--other-data" in refused
        assert main([*words, "--other-data"]) == 0
        assert "a: the run is finished" in capsys.readouterr().out


def test_who_comes_when_the_run_is_finished_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tiny_spec(program={"factory": FACTORY}, budget_tokens=160)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with served(tmp_path / "run") as (address, _):
        assert main(["learn", "--name", "a", "--address", address]) == 0
        capsys.readouterr()
        for words in (["learn", "--name", "b"], ["evaluate"]):
            assert main([*words, "--address", address]) == 0
            assert "run tiny is finished already" in capsys.readouterr().out
