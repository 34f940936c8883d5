"""The faults of `diloco chaos` on containers, the links of a map, and what kill -9 leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from harness.chaos.ledger import read_receipts
from harness.chaos.outages import Outage, OutageKind
from harness.chaos.plan import ChaosPlan, Places, small_data, small_spec
from harness.chaos.run import Chaos
from harness.chaos.schedule import Faults
from harness.compose import HELD_LABEL
from harness.contained import Containers
from harness.engine import left_of, projects_at_rest
from harness.environment import child_environment
from harness.link import LinkShape
from harness.plan import SERVER, names_of
from harness.processes import Command

CUT_S = 8.0
"""Longer than a lease of the run lasts."""


def wait_for(is_so: Callable[[], bool], limit_s: float) -> None:
    """Asks ten times a second; the bound is for a test that fails."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.timeout(300)
def test_nothing_is_lost_whatever_befalls_containers(image: str, tmp_path: Path) -> None:
    plan = ChaosPlan(
        tmp_path, small_spec(), Faults(), learners=2, data=small_data(), tokens=150_000,
        checkpoint_every_s=5.0, image=image,
    )  # fmt: skip
    us, eu = names_of(plan.islands)
    kind = OutageKind
    outages = (
        Outage(what=kind.KILL, whom=eu, at_s=1, for_s=1),
        Outage(what=kind.PARTITION, whom=us, at_s=4, for_s=CUT_S),
        Outage(what=kind.DISK_FULL, at_s=8, for_s=2),
        Outage(what=kind.SERVER_KILL, at_s=14, for_s=1),
        Outage(what=kind.STOP, whom=eu, at_s=19, for_s=2),
        Outage(what=kind.RATE, whom=us, at_s=19, for_s=2, mbit=0.5),
        Outage(what=kind.SLOW, whom=eu, at_s=22, for_s=2, factor=3),
    )
    lines: list[str] = []
    before = projects_at_rest(HELD_LABEL)
    result = Chaos(replace(plan, outages=outages), threading.Event(), lines.append).run()
    assert result.holds, (result.findings, lines)
    assert len(result.outages) == len(outages), lines
    assert result.acknowledged > 0
    assert result.acknowledged_lost == result.applied_twice == result.digest_mismatches == 0
    assert (result.epochs, result.image) == (1, image)
    assert result.starts == 2
    # Nothing of a region that is cut off is acknowledged, and it trains on.
    places = Places(tmp_path)
    arrived = [each.unix_s for each in read_receipts([places.receipts(us)])]
    assert max(later - one for one, later in pairwise(arrived)) >= CUT_S - 1
    assert result.bytes_up > 0
    assert places.timeline.read_bytes().startswith(b"\x89PNG")
    assert f"| each process in a container of | `{image}` |" in places.report.read_text()
    assert projects_at_rest(HELD_LABEL) == before


ANSWERS = """
import socket, threading
def serve(end):
    while heard := end.recv(1 << 16):
        end.sendall(b"!" if heard.endswith(b"?") else b"")
door = socket.create_server(("", 7700))
while True:
    threading.Thread(target=serve, args=(door.accept()[0],), daemon=True).start()
"""

ASKS = """
import socket, time
for _ in range(100):
    try:
        end = socket.create_connection(("wan", 7700))
        end.sendall(b"?")
        assert end.recv(1) == b"!"
        break
    except (OSError, AssertionError):
        time.sleep(0.1)
began = time.monotonic()
end.sendall(b"?"); end.recv(1)
print("there and back", time.monotonic() - began)
began = time.monotonic()
end.sendall(b"." * 500_000 + b"?"); end.recv(1)
print("half a megabyte", time.monotonic() - began, flush=True)
"""


def ground(image: str, out: Path) -> Containers:
    shapes = {"near": LinkShape(), "far": LinkShape(rate_mbit=4, delay_s=0.1)}
    return Containers(image, out, shapes)


def script(name: str, text: str, out: Path) -> Command:
    return Command(name, (sys.executable, "-c", text), out / "logs" / f"{name}.log", {})


@pytest.mark.timeout(120)
def test_each_container_has_the_link_that_the_map_gives_it(image: str, tmp_path: Path) -> None:
    server = script(SERVER, ANSWERS, tmp_path)
    learners = [script(name, ASKS, tmp_path) for name in ("near", "far")]
    with ground(image, tmp_path) as place:
        place.prepare([server, *learners])
        place.processes.start(server)
        for each in learners:
            place.processes.start(each)

        def all_have_ended() -> bool:
            place.processes.poll()
            return all(place.processes.settled(each.name) for each in learners)

        wait_for(all_have_ended, 60)
        assert [place.processes.exit_code(each.name) for each in learners] == [0, 0]
    took = {
        each.name: [float(line.split()[-1]) for line in each.log.read_text().splitlines()]
        for each in learners
    }
    assert took["far"][0] >= 0.2
    # 500 kB at 4 Mbit/s take a second, and what stands in the queue before the last of it is on.
    assert took["far"][1] >= 1.0
    assert took["near"][1] < took["far"][1]
    assert left_of(place.project, "container") == left_of(place.project, "network") == []


HOLDS = """
import sys, time
from pathlib import Path
from tests.containers.test_chaos import ground, script
from harness.plan import SERVER
out = Path(sys.argv[2])
with ground(sys.argv[1], out) as place:
    server = script(SERVER, "import time; time.sleep(600)", out)
    place.prepare([server])
    place.processes.start(server)
    print(place.project, flush=True)
    time.sleep(600)
"""


@pytest.mark.timeout(120)
def test_kill_9_of_a_run_ends_its_containers_and_the_next_run_removes_them(
    image: str, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", HOLDS, image, str(tmp_path)]
    run = subprocess.Popen(words, env=child_environment(), stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run.stdout as told:
        project = told.readline().strip()
    assert len(left_of(project, "container")) == 2
    assert project not in projects_at_rest(HELD_LABEL)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_for(lambda: project in projects_at_rest(HELD_LABEL), 30)
    with ground(image, tmp_path):
        assert left_of(project, "container") == left_of(project, "network") == []
