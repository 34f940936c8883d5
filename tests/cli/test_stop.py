"""Every process stops within five seconds, with its state kept and without a traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.environment import child_environment, command
from outer_server.store.rundir import create_run, read_run
from tests.support.tiny import tiny_birth, tiny_spec

SCRIPT = """
import sys, time
from cli.stop import stop_on_signal
insist_after_s = 0.0 if sys.argv[1] == "insisted" else 2.0
with stop_on_signal(
    exit_with_parent=sys.argv[1] == "parent", insist_after_s=insist_after_s
) as stop:
    print("ready", flush=True)
    if sys.argv[2] == "stubborn":
        time.sleep(60)
    stop.wait()
print("kept", flush=True)
"""


def _start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv,
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(process: subprocess.Popen[str]) -> tuple[int, str, str, float]:
    """Exit code, what else it said, and how long it took from now on."""
    began_s = time.monotonic()
    out, error = process.communicate(timeout=20)
    return process.returncode, out, error, time.monotonic() - began_s


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_sets_the_event_and_the_verb_ends_itself(number: signal.Signals) -> None:
    process = _start(sys.executable, "-P", "-c", SCRIPT, "alone", "willing")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    code, out, error, _ = _ended(process)
    assert (code, out, error) == (0, "kept\n", "")


def test_the_end_of_stdin_is_the_end_of_the_parent() -> None:
    process = _start(sys.executable, "-P", "-c", SCRIPT, "parent", "willing")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    code, out, _, _ = _ended(process)  # closes its stdin
    assert (code, out) == (0, "kept\n")


def test_a_verb_that_does_not_listen_is_ended_within_five_seconds() -> None:
    process = _start(sys.executable, "-P", "-c", SCRIPT, "alone", "stubborn")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    code, _, error, took_s = _ended(process)
    assert code == 1
    assert "ended hard" in error
    assert took_s < 5


def test_a_second_signal_ends_it_at_once() -> None:
    process = _start(sys.executable, "-P", "-c", SCRIPT, "insisted", "stubborn")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    code, _, error, took_s = _ended(process)
    assert code == 1
    assert "told to stop again" in error
    assert took_s < 3


def test_a_signal_that_comes_twice_within_a_moment_is_one() -> None:
    process = _start(sys.executable, "-P", "-c", SCRIPT, "alone", "willing")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    code, out, error, _ = _ended(process)
    assert (code, out, error) == (0, "kept\n", "")


UNBEGUN = """
import sys, threading, time
from cli.stop import Unbegun, stop_on_signal
begun = threading.Event()
with stop_on_signal(unbegun=Unbegun(begun, "nothing to keep")) as stop:
    if sys.argv[1] == "begun":
        begun.set()
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "code", "least_s", "most_s", "said"),
    [("not", 0, 0.0, 2.0, "nothing to keep"), ("begun", 1, 3.0, 5.0, "ended hard")],
)
def test_what_has_nothing_to_keep_ends_soon_and_well(
    how: str, code: int, least_s: float, most_s: float, said: str
) -> None:
    process = _start(sys.executable, "-P", "-c", UNBEGUN, how)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    found, out, error, took_s = _ended(process)
    assert found == code
    assert said in out + error
    assert least_s < took_s < most_s


def test_a_server_stops_cleanly_and_serves_the_same_run_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    create_run(run, tiny_spec(), *tiny_birth(tiny_spec()))
    for _ in range(2):
        words = ("serve", str(run), "--address", "127.0.0.1:0", "--bulk-port", "0")
        process = _start(*command(*words))
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving run tiny at 127.0.0.1:")
        place = json.loads((run / "address.json").read_text())
        assert place["pid"] == process.pid
        assert not place["address"].endswith(":0")
        process.send_signal(signal.SIGTERM)
        code, out, error, took_s = _ended(process)
        assert code == 0, error
        assert "Traceback" not in error
        assert took_s < 20
        assert f"the state is in {run}" in out
        assert not (run / "address.json").exists()
    record = json.loads((run / "server.json").read_text())
    assert (record["generation"], record["epoch"], record["clean"]) == (2, 1, True)
    assert record["snapshot"] == max(path.name for path in (run / "snapshots").iterdir())
    assert read_run(run)[0].run_id == "tiny"


def test_a_port_in_use_and_an_open_address_are_refused_in_one_sentence(tmp_path: Path) -> None:
    run = tmp_path / "run"
    create_run(run, tiny_spec(), *tiny_birth(tiny_spec()))
    done = subprocess.run(
        command("serve", str(run), "--address", "0.0.0.0:7700"),
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--insecure" in done.stderr
    words = ("serve", str(run), "--address", "127.0.0.1:0", "--bulk-port", "0")
    process = _start(*command(*words))
    assert process.stdout is not None
    process.stdout.readline()
    port = json.loads((run / "address.json").read_text())["address"].rpartition(":")[2]
    second = tmp_path / "second"
    create_run(second, tiny_spec(), *tiny_birth(tiny_spec()))
    refused = subprocess.run(
        command("serve", str(second), "--address", f"127.0.0.1:{port}", "--bulk-port", "0"),
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    in_use = subprocess.run(
        command("serve", str(run), "--address", f"127.0.0.1:{port}", "--bulk-port", "0"),
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    process.send_signal(signal.SIGINT)
    code, _, error, _ = _ended(process)
    assert code == 0, error
    assert refused.returncode == 2
    assert f"127.0.0.1:{port} is in use" in refused.stderr
    assert in_use.returncode == 5
    assert (
        f"in use by a server at 127.0.0.1:{port} (process {process.pid}): stop that one"
        in in_use.stderr
    )
