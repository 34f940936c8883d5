"""Supervision with real children: deaths, restarts, the bound, and no child left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fragments.errors import DilocoError
from harness.environment import child_environment
from harness.processes import Command, EventKind, Supervisor

WAITS = "import sys; print('up', flush=True); sys.stdin.read()"
DEAF = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " print('up', flush=True); time.sleep(60)"
)


def child(tmp_path: Path, script: str, max_restarts: int = 0, name: str = "c") -> Command:
    argv = (sys.executable, "-c", script)
    return Command(name, argv, tmp_path / f"{name}.log", child_environment(), max_restarts)


def until(processes: Supervisor, is_so: Callable[[], bool], limit_s: float = 15) -> None:
    """Polls until something is so; the bound is for a test that fails."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s, processes.events
        processes.poll()
        time.sleep(0.01)


def kinds(processes: Supervisor, name: str = "c") -> list[EventKind]:
    return [event.kind for event in processes.events if event.name == name]


def up(tmp_path: Path, times: int = 1, name: str = "c") -> Callable[[], bool]:
    log = tmp_path / f"{name}.log"
    return lambda: log.exists() and log.read_text().count("up\n") >= times


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


PARENT = """
import sys, time
from pathlib import Path
from harness.environment import child_environment
from harness.processes import Command, Supervisor
script = "import sys; print('up', flush=True); sys.stdin.read()"
command = Command("c", (sys.executable, "-c", script), Path(sys.argv[1]), child_environment())
with Supervisor() as processes:
    processes.start(command)
    while "up" not in Path(sys.argv[1]).read_text():
        time.sleep(0.01)
    processes.pause("c")
    print(processes.pids()["c"], flush=True)
    time.sleep(60)
"""


def test_a_child_that_stands_still_ends_with_its_parent(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PARENT, str(tmp_path / "c.log")]
    parent = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=child_environment())
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    state = Path(f"/proc/{pid}/status")
    assert "(stopped)" in state.read_text()
    parent.kill()
    parent.communicate(timeout=15)
    give_up_s = time.monotonic() + 15
    while state.exists() and "(zombie)" not in state.read_text():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_a_killed_child_is_started_again_and_every_step_is_an_event(tmp_path: Path) -> None:
    with Supervisor(restart_delay_s=0.01) as processes:
        processes.start(child(tmp_path, WAITS, max_restarts=1))
        until(processes, up(tmp_path))
        processes.kill("c", "at step 3")
        until(processes, up(tmp_path, times=2))
        assert kinds(processes) == [
            EventKind.STARTED,
            EventKind.KILLED,
            EventKind.DIED,
            EventKind.RESTARTED,
        ]
        killed, died, back = processes.events[1:4]
        assert killed.detail == "at step 3"
        assert died.exit_code == -signal.SIGKILL
        assert killed.at_s <= died.at_s <= back.at_s
        assert killed.pid == died.pid != back.pid
        assert processes.restarts("c") == 1
        assert processes.running("c")


def test_restarts_are_bounded_and_the_last_words_are_told(tmp_path: Path) -> None:
    dies = "import sys; print('up'); sys.exit('no luck')"
    with Supervisor(restart_delay_s=0.01) as processes:
        processes.start(child(tmp_path, dies, max_restarts=2))
        until(processes, lambda: processes.settled("c"))
        assert kinds(processes).count(EventKind.RESTARTED) == 2
        assert kinds(processes)[-1] is EventKind.GAVE_UP
        with pytest.raises(DilocoError, match="c ended with exit code 1: no luck"):
            processes.require_alive("c")


def test_a_structured_log_line_is_no_reason_of_a_death(tmp_path: Path) -> None:
    dies = "import sys; print('sentence'); print('{\"event\": \"state\"}'); sys.exit(1)"
    with Supervisor(restart_delay_s=0.01) as processes:
        processes.start(child(tmp_path, dies))
        until(processes, lambda: processes.settled("c"))
        (death,) = [one for one in processes.events if one.kind is EventKind.DIED]
        assert death.detail == ""
        with pytest.raises(DilocoError, match=r"c ended with exit code 1: its log is .*\.log"):
            processes.require_alive("c")


def test_a_refused_or_mistyped_child_is_not_tried_again(tmp_path: Path) -> None:
    with Supervisor(restart_delay_s=0.01) as processes:
        processes.start(child(tmp_path, "import sys; sys.exit(2)", max_restarts=5))
        until(processes, lambda: processes.settled("c"))
        assert processes.restarts("c") == 0
        assert processes.exit_code("c") == 2


def test_a_child_that_is_done_is_not_started_again(tmp_path: Path) -> None:
    with Supervisor(restart_delay_s=0.01) as processes:
        processes.start(child(tmp_path, "pass", max_restarts=5))
        until(processes, lambda: processes.settled("c"))
        assert kinds(processes) == [EventKind.STARTED, EventKind.ENDED]


def test_what_does_not_hear_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    with Supervisor() as processes:
        processes.start(child(tmp_path, DEAF))
        processes.start(child(tmp_path, WAITS, name="willing"))
        until(processes, up(tmp_path))
        until(processes, up(tmp_path, name="willing"))
        processes.stop(["c", "willing"], grace_s=0.3)
        assert processes.exit_code("c") == -signal.SIGKILL
        assert processes.exit_code("willing") == -signal.SIGTERM
        assert processes.events[-2].detail == "did not stop within 0.3 s"
        assert kinds(processes, "willing")[-1] is EventKind.STOPPED


def test_leaving_ends_the_children_and_their_children_only(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE)
    with Supervisor() as processes:
        processes.start(child(tmp_path, WAITS))
        until(processes, up(tmp_path))
        pid = processes.events[0].pid
    try:
        assert not is_alive(pid)
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"", timeout=10)


def test_children_see_the_end_of_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = f"""
import sys, time
from pathlib import Path
from harness.environment import child_environment
from harness.processes import Command, Supervisor
processes = Supervisor()
argv = (sys.executable, "-c", {WAITS!r} + "; print('orphaned', flush=True)")
processes.start(Command("c", argv, Path({str(tmp_path / "c.log")!r}), child_environment()))
print(processes.events[0].pid, flush=True)
time.sleep(60)
"""
    argv = [sys.executable, "-P", "-c", parent]
    with subprocess.Popen(argv, env=child_environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        log = tmp_path / "c.log"
        deadline_s = time.monotonic() + 15
        while "up\n" not in log.read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        process.kill()
        while "orphaned\n" not in log.read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_a_name_is_taken_while_its_bearer_runs(tmp_path: Path) -> None:
    with Supervisor() as processes:
        processes.start(child(tmp_path, WAITS))
        with pytest.raises(ValueError, match="c is running already"):
            processes.start(child(tmp_path, WAITS))


def test_kills_of_a_drill_earn_no_longer_pauses_and_may_keep_a_child_away(tmp_path: Path) -> None:
    with Supervisor(restart_delay_s=0.1) as processes:
        processes.start(child(tmp_path, WAITS, max_restarts=20))
        for times in range(1, 9):
            until(processes, up(tmp_path, times))
            processes.kill("c", "again")
            until(processes, lambda: not processes.running("c"))
        until(processes, up(tmp_path, times=9))
        died = [one.at_s for one in processes.events if one.kind is EventKind.DIED]
        back = [one.at_s for one in processes.events if one.kind is EventKind.RESTARTED]
        # Doubled each time, the eighth pause alone would be one of 12.8 s.
        assert sum(b - d for d, b in zip(died, back, strict=True)) < 12.8
        processes.kill("c", "for a while", away_s=1.0)
        until(processes, up(tmp_path, times=10))
        assert processes.events[-1].at_s - processes.events[-2].at_s >= 1.1


def test_a_paused_child_stands_still_goes_on_and_can_be_stopped(tmp_path: Path) -> None:
    echoes = "import sys; print('up', flush=True)\nfor line in sys.stdin: print('up', flush=True)"
    with Supervisor() as processes:
        processes.start(child(tmp_path, echoes))
        until(processes, up(tmp_path))
        pid = processes.pids()["c"]
        processes.pause("c")
        until(processes, lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T")
        processes.resume("c")
        until(processes, lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "S")
        processes.pause("c")
        processes.stop(["c"])
        assert processes.exit_code("c") == -signal.SIGTERM
        assert EventKind.PAUSED in kinds(processes)
        assert EventKind.CONTINUED in kinds(processes)
