"""What is told of a run afterwards: events, data account, replay and export, as a person asks."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from cli.main import main
from fragments.records import Evaluation, Hello, Role
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from tests.support.story import Story
from tests.support.tiny import tiny_birth, tiny_spec


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    story = Story(tmp_path_factory.mktemp("past"), keep_journal=True)
    story.live(5, "1")
    return story.run


def test_events_are_sentences_or_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(run)]) == 0
    text = capsys.readouterr().out
    assert "merged from" in text
    assert "sends fragment" in text
    assert "a round on fragment 1 at " in text
    assert "=" not in text, "words, not a log"
    assert main(["events", str(run), "--json", "--every"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    numbers = [line["number"] for line in lines]
    assert numbers == sorted(numbers)
    assert {"Reported", "Merged", "Contributed"} <= {line["event"] for line in lines}
    assert main(["events", str(run), "--learner", "a", "--last", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["events", str(run), "--learner", "nobody"]) == 2
    assert "no such learner here: there are a, b, c" in capsys.readouterr().err


def test_events_before_and_after_a_damaged_one_are_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = Path(shutil.copytree(run, tmp_path / "run"))
    assert main(["events", str(run), "--every", "--json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])["number"]
    with sqlite3.connect(damaged / "journal" / "tape.sqlite") as tape:
        tape.execute("UPDATE event SET body = 'x' WHERE number = ?", (first + 1,))
    assert main(["events", str(run), "--every"]) == 0
    whole = capsys.readouterr().out.splitlines()
    assert main(["events", str(damaged), "--every"]) == 5
    told, error = capsys.readouterr()
    assert told.splitlines()[0] == whole[0]
    assert told.splitlines()[-1] == whole[-1]
    assert f"[event {first + 1} cannot be read" in told
    assert "the run is whole: a server goes on from snapshot" in error
    assert main(["events", str(damaged), "--last", "1"]) == 5
    assert capsys.readouterr().out.splitlines() == whole[-1:]


def test_an_evaluation_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    create_run(run, tiny_spec(), *tiny_birth(tiny_spec()))
    with OuterServer(run) as server:
        digest = server.describe().layout_digest
        lease = server.join(Hello(1, "tiny", digest, "judge", Role.EVALUATOR, "1")).lease
        server.evaluated(lease, Evaluation(2.5, "nats/byte", 7, 112, (0, 0)))
        server.leave(lease, "done")
    capsys.readouterr()
    assert main(["events", str(run)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "held-out" in line]
    assert len(lines) == 1
    assert lines[0].endswith("  held-out loss 2.5000 nats/byte at step 7, 112 tokens")
    assert main(["events", str(run)]) == 0
    assert "evaluation" not in capsys.readouterr().out


def test_the_account_of_the_data_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(run), "--data"]) == 0
    told = capsys.readouterr().out
    assert "batches merged" in told
    assert "batches counted twice: 0" in told


def _command(*words: str) -> str:
    """What a process of its own prints: one that computes versions sets up its arithmetic first."""
    argv = [sys.executable, "-P", "-m", "cli", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_replay_computes_every_digest_again(run: Path) -> None:
    found = json.loads(_command("replay", str(run), "--json"))
    assert (found["digest_mismatches"], found["damage"]) == (0, "")
    assert found["merges"] > 0
    assert "every digest since version" in _command("replay", str(run))


def test_a_replay_without_any_merge_says_that_there_was_nothing_to_compare(
    run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    for snapshot in sorted((copy / "snapshots").iterdir())[:-1]:
        shutil.rmtree(snapshot)
    told = _command("replay", str(copy))
    assert "0 merges computed anew" in told
    assert "there was nothing to compute anew" in told
    assert "1 of them whole" in told
    assert "what it was" not in told


def test_the_newest_weights_are_exported_once(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "weights.safetensors"
    assert "9 parameters" in _command("export", str(run), str(out))
    assert {name: value.shape for name, value in load_file(out).items()} == {
        "['b']": (1,),
        "['w']": (8,),
    }
    assert main(["export", str(run), str(out)]) == 2
    assert "exists" in capsys.readouterr().err


def test_a_damaged_journal_is_exported_only_when_asked(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = Path(shutil.copytree(run, tmp_path / "run"))
    for snapshot in sorted((damaged / "snapshots").iterdir())[1:]:
        shutil.rmtree(snapshot)
    with sqlite3.connect(damaged / "journal" / "tape.sqlite") as tape:
        (last,) = tape.execute("SELECT max(number) FROM event").fetchone()
        tape.execute("UPDATE event SET at_s = at_s + 1 WHERE number = ?", (last,))
    out = tmp_path / "weights.safetensors"
    argv = [sys.executable, "-P", "-m", "cli", "export", str(damaged), str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "--despite-damage" in done.stderr) == (5, True)
    assert not out.exists()
    assert "9 parameters" in _command("export", str(damaged), str(out), "--despite-damage")
    assert main(["export", str(damaged), str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "weights.txt")]) == 2
    assert "must end with .safetensors" in capsys.readouterr().err


def test_what_was_never_served_has_no_past(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", str(tmp_path)]) == 5
    assert "is not a run directory" in capsys.readouterr().err
