"""A whole local run of real processes, with a learner killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from harness.environment import child_environment, command
from harness.pace import PaceBench, PacePlan, endless
from harness.summary import Summary
from tests.support.tiny import tiny_spec

TINY = (
    *("--program.factory", "tests.harness.factory:build"),
    *("--fragments", "2", "--codec.block", "8", "--sync-interval", "0:4,0.5:8"),
    *("--evaluate-every-s", "0.5", "--pace-s", "0.02"),
)


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("run", *TINY, *words), env=child_environment(), capture_output=True, text=True
    )


@pytest.mark.timeout(110)
def test_the_first_island_may_begin_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Long enough for the second to start and join on a busy machine.
    words = ("--budget-tokens", "24000", "--lead-share", "0.1", "--learners", "2")
    done = _run("--out", str(out), *words, "--slow-factor", "1", "--no-baselines")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = Summary.read(out / "summary.json")
    by_name = {one.name: one for one in summary.learners}
    # At the pace of both the first makes a tenth of the steps before the other is even started.
    lead = by_name["eu-west"].tokens - by_name["us-east"].tokens
    assert lead >= 0.1 * 24_000 - 64
    assert by_name["us-east"].contributions_merged > 0
    assert summary.digests_equal


@pytest.mark.timeout(110)
def test_a_run_on_a_map_goes_over_its_links_at_its_speeds(tmp_path: Path) -> None:
    places = tmp_path / "map.toml"
    places.write_text("[regions.near]\n[regions.far]\nrate_mbit = 2\ndelay_ms = 30\nspeed = 0.25\n")
    out = tmp_path / "out"
    words = ("--map", str(places), "--budget-tokens", "12000", "--no-baselines")
    done = _run("--out", str(out), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = Summary.read(out / "summary.json")
    by_name = {one.name: one for one in summary.learners}
    assert set(by_name) == {"near", "far"}
    assert 0 < by_name["far"].steps < 0.5 * by_name["near"].steps
    assert by_name["far"].contributions_merged > 0
    assert summary.digests_equal
    assert "the link of far carried" in done.stdout
    assert "the link of near" not in done.stdout


@pytest.mark.timeout(110)
def test_a_run_survives_a_kill_and_ends_by_itself_with_equal_weights(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # About eight seconds of training: long enough for the killed one to come back in it.
    words = ("--budget-tokens", "14000", "--kill", "us-east@60", "--checkpoint-every-s", "0.2")
    done = _run("--out", str(out), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr

    summary = Summary.read(out / "summary.json")
    assert summary.finished
    assert summary.digests_equal
    assert summary.tokens >= 14_000
    assert summary.rounds > 0
    assert summary.loss_first is not None
    assert summary.loss_last is not None
    assert summary.loss_last < 0.1 * summary.loss_first
    assert summary.loss_bigram == 1.0
    assert summary.loss_alone is not None
    assert summary.alone_tokens == summary.tokens // 3
    assert sum(one.tokens for one in summary.learners) == summary.tokens
    by_name = {one.name: one for one in summary.learners}
    assert set(by_name) == {"asia-slow", "eu-west", "us-east"}
    assert all(one.contributions_merged > 0 for one in summary.learners)
    assert by_name["us-east"].joins == 2
    assert by_name["us-east"].restarts == summary.restarts == 1
    assert by_name["eu-west"].joins == 1
    assert by_name["asia-slow"].steps < 0.5 * by_name["eu-west"].steps
    # Baselines come after the last event, and evaluations are told on the events' clock.
    assert summary.total_s > max(one.at_s for one in summary.events)
    began_s = min(one.at_s for one in summary.events if one.name == "eu-west")
    assert all(began_s < one.at_s < summary.total_s for one in summary.evaluations)
    happened = [(one.name, one.kind) for one in summary.events]
    for event in ("killed", "died", "restarted", "rejoined"):
        assert ("us-east", event) in happened
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "us-east rejoined after its kill -9" in done.stdout
    # It went on from its checkpoint: its steps and moments, not from nothing.
    assert '"event": "resumed"' in (out / "logs" / "us-east.log").read_text()
    assert list((out / "checkpoints" / "us-east").glob("*/state.safetensors"))
    assert "one learner alone" in done.stdout


@pytest.mark.timeout(60)
def test_a_run_stops_within_five_seconds_and_leaves_no_process(tmp_path: Path) -> None:
    words = ("run", "--out", str(tmp_path / "out"), "--budget-tokens", "100000000", *TINY)
    process = subprocess.Popen(
        command(*words),
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "starting: making the run …\n"
    for line in process.stdout:
        if not line.startswith("starting: "):
            break
    assert line.startswith("process ids: server "), process.communicate()[1]
    place = json.loads((tmp_path / "out" / "run" / "address.json").read_text())
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=5)
    assert process.returncode == 0, error
    assert "stopped before the end" in out
    assert "Traceback" not in error
    with pytest.raises(ProcessLookupError):
        os.kill(place["pid"], 0)
    run = tmp_path / "out" / "run"
    newest = max(path.name for path in (run / "snapshots").iterdir())
    kept = json.loads((run / "server.json").read_text())
    assert (kept["generation"], kept["epoch"], kept["clean"]) == (1, 1, True)
    assert kept["snapshot"] == newest


def test_a_run_that_cannot_be_made_says_why_in_the_words_of_init(tmp_path: Path) -> None:
    done = _run("--out", str(tmp_path / "out"), "--fragments", "99")
    assert done.returncode == 1
    assert done.stderr.startswith("diloco: init ended with exit code 2: diloco: cannot spread")
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(100)
def test_the_pace_bench_measures_a_slow_learner_that_comes_and_goes(tmp_path: Path) -> None:
    spec = tiny_spec(program={"factory": "tests.harness.factory:build"}, sync_interval=8)
    plan = PacePlan(tmp_path, endless(spec), pairs=1, window_s=1.5, pace_s=0.05)
    synchronous = replace(plan, slow=2).synchronous().spec
    assert (synchronous.quorum, synchronous.fragments) == (4, 1)
    assert synchronous.program == spec.program
    lines: list[str] = []
    result = PaceBench(plan, threading.Event(), lines.append).run()
    assert len(result.ratios) == len(lines) == 1
    assert result.ratio_min <= result.ratio_median <= result.ratio_max
    # What it measures, not how fast this machine happens to be: a paced learner is never faster.
    assert all(0 < rate < 1.1 / 0.05 for rate in (*result.without_slow, *result.with_slow))
    assert result.slow_contributions_merged > 0
    assert result.equal == (abs(result.ratio_median - 1) <= result.bound)
