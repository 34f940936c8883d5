"""The network between regions: links by who dials, and a map that changes while they carry."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.environment import child_environment, module
from harness.wan import Wan

US, ASIA, STRANGER = "127.0.0.2", "127.0.0.3", "127.0.0.4"
CALM = "[regions.us-east]\n[regions.asia]\n"


async def find(region: str) -> set[str]:
    """Where the regions of these tests dial from."""
    return {{"us-east": US, "asia": ASIA}[region]}


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that says what it hears."""
    server = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def serve(end: socket.socket) -> None:
        while heard := end.recv(1 << 16):
            end.sendall(heard)

    def accept() -> None:
        while True:
            try:
                end, _ = server.accept()
            except OSError:
                return
            ends.append(end)
            threading.Thread(target=serve, args=(end,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    for each in (server, *ends):
        each.close()


def dial(wan: Wan, host: str) -> socket.socket:
    (port,) = wan.ports
    return socket.create_connection(("127.0.0.1", port), 10, source_address=(host, 0))


def ask(end: socket.socket, limit_s: float = 10) -> bytes:
    """One word there and back; TimeoutError where it does not come."""
    end.settimeout(limit_s)
    end.sendall(b"word")
    return end.recv(4)


def until(is_so: Callable[[], bool], limit_s: float = 10) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def change(path: Path, text: str, wan: Wan) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    wan.follow()


def test_links_are_told_apart_by_who_dials_and_follow_the_map(tmp_path: Path, echo: int) -> None:
    path, said = tmp_path / "map.toml", list[str]()
    path.write_text(CALM, encoding="utf-8")
    with Wan(path, [("127.0.0.1", echo)], said.append, find, [0]) as wan:
        us, asia = dial(wan, US), dial(wan, ASIA)
        with us, asia:
            assert ask(us) == ask(asia) == b"word"
            change(path, CALM.replace("asia]", "asia]\ncut = true"), wan)
            with pytest.raises(TimeoutError):
                ask(asia, 0.3)
            assert ask(us) == b"word"
            change(path, CALM.replace("asia]", "asia]\ndelay_ms = 100"), wan)
            # What was under way during the cut arrives after it.
            asia.settimeout(10)
            assert asia.recv(4) == b"word"
            began_s = time.monotonic()
            assert ask(asia) == b"word"
            assert time.monotonic() - began_s >= 0.2
            until(lambda: wan.carried_bytes() == {"us-east": (8, 8), "asia": (12, 12)})
    assert said == [
        *("us-east: any rate, 0 ms, speed 1", "asia: any rate, 0 ms, speed 1"),
        *("asia: cut off", "asia: any rate, 100 ms, speed 1"),
    ]


def test_who_is_on_no_map_is_refused_and_a_broken_map_changes_nothing(
    tmp_path: Path, echo: int
) -> None:
    path, said = tmp_path / "map.toml", list[str]()
    path.write_text(CALM, encoding="utf-8")
    with Wan(path, [("127.0.0.1", echo)], said.append, find, [0]) as wan:
        with dial(wan, STRANGER) as end:
            assert end.recv(1) == b""
        assert said[-1] == f"{STRANGER} dials and is no region of the map: refused"
        change(path, "[regions.us-east]\nrate_mbits = 3\n", wan)
        assert said[-1].startswith("all links stay as they are: ")
        assert "did you mean" in said[-1]
        with dial(wan, US) as end:
            assert ask(end) == b"word"
        change(path, "[regions.us-east]\n", wan)
        assert said[-1] == "asia: no longer on the map"
        with dial(wan, ASIA) as end:
            assert end.recv(1) == b""


HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "wb")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_it_ends_with_whoever_wanted_it_however_that_ends(tmp_path: Path) -> None:
    path, held = tmp_path / "map.toml", tmp_path / "held"
    path.write_text(CALM, encoding="utf-8")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(held)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    carried = tmp_path / "carried.json"
    words = (str(path), f"localhost:{port}", "--carried", str(carried), "--while-held", str(held))
    wan = subprocess.Popen(module("harness.wan", *words), env=child_environment())
    try:
        until(carried.exists, 30)
        assert wan.poll() is None
        os.kill(holder.pid, signal.SIGKILL)
        assert wan.wait(30) == 0
    finally:
        wan.kill()
        wan.wait()
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
