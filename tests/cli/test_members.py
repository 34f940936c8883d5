"""init, learn, evaluate and status --watch as processes against a real server."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.main import main
from harness.environment import child_environment, command
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run, read_run
from services.outer.server import OuterServices
from services.settings import ServerSettings
from tests.support.tiny import tiny_birth, tiny_spec

FACTORY = "tests.harness.factory:build"


@contextmanager
def served(run: Path, address: str = "127.0.0.1:0") -> Iterator[tuple[str, OuterServer]]:
    """A server of the run in this process: its address, and the server itself."""
    with OuterServer(run) as outer:
        services = OuterServices(outer, ServerSettings(address=address, bulk_port=0))
        services.start()
        try:
            yield str(services.address), outer
        finally:
            services.stop()


def tiny_run(path: Path, **settings: object) -> Path:
    spec = tiny_spec(program={"factory": FACTORY}, **settings)
    create_run(path, spec, *tiny_birth(spec))
    return path


def _start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*words),
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_init_writes_the_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = ["init", str(run), "--program.factory", FACTORY, "--fragments", "2"]
    words += ["--codec.block", "8", "--budget-tokens", "4000", "--outer.momentum", "0.5"]
    assert main(words) == 0
    assert "2 fragments; 4,000 tokens to train" in capsys.readouterr().out
    spec, layout = read_run(run)
    assert (spec.budget_tokens, spec.outer.momentum) == (4000, 0.5)
    assert spec.program.identity == layout.identity == "tiny"
    assert spec.run_id

    assert main(words) == 5
    assert "exists already" in capsys.readouterr().err
    assert main([*words, "--if-missing"]) == 0
    assert f"run {spec.run_id} is there already" in capsys.readouterr().out
    assert read_run(run) == (spec, layout)


def test_learner_and_evaluator_finish_a_run_and_the_watcher_sees_it(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", budget_tokens=3200)
    with served(run) as (address, outer):
        watching = _start("status", "--watch", "--json", "--address", address)
        judging = _start("evaluate", "--address", address, "--every-s", "0.2")
        learning = _start("learn", "--address", address, "--name", "only", "--pace-s", "0.01")
        ends = {
            name: (*process.communicate(timeout=60), process.returncode)
            for name, process in (("l", learning), ("e", judging), ("w", watching))
        }
        status = outer.status()
    assert [code for _, _, code in ends.values()] == [0, 0, 0], ends
    out, log, _ = ends["l"]
    told = re.search(r"only: the run is finished; (\d+) steps, ([\d,]+) tokens", out)
    assert told is not None
    # It steps on until it hears that the budget of 200 steps is spent: a few more under load.
    steps = int(told[1])
    assert 200 <= steps <= 220
    assert int(told[2].replace(",", "")) == 16 * steps
    assert status.weights_digest[:16] in out
    assert "Traceback" not in log
    # What the server had heard of when it ended; the learner may have made a step more by then.
    evaluated = [int(step) for step in re.findall(r"squared distance at step (\d+)", ends["e"][0])]
    assert 100 <= evaluated[-1] <= steps
    seen = [json.loads(line) for line in ends["w"][0].splitlines()]
    assert seen[-1]["phase"] == "finished"
    assert seen[-1]["run_id"] == "tiny"


def test_a_learner_that_is_there_before_its_server_waits_for_it(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", budget_tokens=320)
    with served(run) as (address, _):
        pass  # A port that is free again.
    words = ("learn", "--address", address, "--name", "a", "--log-format", "json")
    process = _start(*words, "--link.tries", "1", "--link.retry-wait-s", "0.01")
    assert process.stderr is not None
    for line in process.stderr:
        if '"server_away"' in line:
            break
    with served(run, address):
        out, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert "a: the run is finished" in out


def test_a_learner_told_to_stop_gives_its_lease_back(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", budget_tokens=10**9)
    with served(run) as (address, outer):
        process = _start("learn", "--address", address, "--name", "a", "--log-format", "json")
        assert process.stderr is not None
        for line in process.stderr:
            if '"training"' in line:
                break
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=30)
        (left,) = outer.status().learners
    assert process.returncode == 0, log
    assert "a: stopped before the end of the run" in out
    assert left.state.value == "left"
    assert "Traceback" not in log


def test_a_learner_that_is_refused_exits_with_4(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", max_learners=1, budget_tokens=10**9)
    with served(run) as (address, _):
        first = _start("learn", "--address", address, "--name", "a", "--log-format", "json")
        assert first.stderr is not None
        for line in first.stderr:
            if '"training"' in line:
                break
        second = _start("learn", "--address", address, "--name", "b")
        _, refused = second.communicate(timeout=30)
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=30)
    assert second.returncode == 4
    assert refused.splitlines()[-1] == "diloco: the run has its 1 learners already"
    assert first.returncode == 0


def test_a_learner_that_reaches_nobody_exits_with_3() -> None:
    words = ("learn", "--address", "127.0.0.1:1", "--name", "a", "--link.tries", "2")
    process = _start(*words, "--link.retry-wait-s", "0.01", "--patience-s", "0")
    _, error = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "the outer server at 127.0.0.1:1 cannot be reached" in error.splitlines()[-1]
    assert "Traceback" not in error
