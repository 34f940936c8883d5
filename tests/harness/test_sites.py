"""Sites have the links that they are given, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fragments.errors import DilocoError, SettingsError
from harness.environment import child_environment
from harness.sites import Sites
from tests.support.sites import require_sites

PORT = 5001
RATE_MBIT = 20.0
NUM_BYTES = 1_250_000
"""Half a second of the rate."""

RECEIVE = f"""
import socket
server = socket.create_server(("", {PORT}))
print("ready", flush=True)
near, _ = server.accept()
count = 0
while data := near.recv(1 << 16):
    count += len(data)
near.sendall(b"x")
print(count, flush=True)
"""
SEND = f"""
import socket, sys, time
far = socket.create_connection((sys.argv[1], {PORT}), timeout=60)
began_s = time.monotonic()
far.sendall(bytes({NUM_BYTES}))
far.shutdown(socket.SHUT_WR)
assert far.recv(1) == b"x"
print(time.monotonic() - began_s)
"""
DIAL = f"""
import socket, sys
try:
    socket.create_connection((sys.argv[1], {PORT}), timeout=float(sys.argv[2])).close()
except OSError as error:
    print(type(error).__name__)
else:
    print("connected")
"""
MAKE = """
import sys
from harness.sites import Sites
with Sites(["one", "two"], delay_ms=2) as sites:
    print(*(word for name in ("one", "two") for word in sites.words(name) if word.isdigit()))
    sys.stdout.flush()
    sys.stdin.read()
"""


@pytest.fixture
def sites() -> Iterator[Sites]:
    require_sites()
    with Sites(["one", "two"]) as made:
        yield made


ECHO = f"""
import socket
server = socket.create_server(("", {PORT}))
print("ready", flush=True)
near, _ = server.accept()
while data := near.recv(1):
    near.sendall(data)
"""
TALK = f"""
import socket, sys, time
far = socket.create_connection((sys.argv[1], {PORT}), timeout=60)
far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
took_s = []
for _ in range(9):
    began_s = time.monotonic()
    far.sendall(b"x")
    assert far.recv(1) == b"x"
    took_s.append(time.monotonic() - began_s)
print(min(took_s))
"""
DELAY_MS = 20.0


def _start(sites: Sites, name: str, code: str, *words: str) -> subprocess.Popen[str]:
    argv = [*sites.words(name), sys.executable, "-c", code, *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def _told(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.strip()


def _listening(sites: Sites, name: str, code: str = RECEIVE) -> subprocess.Popen[str]:
    process = _start(sites, name, code)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_link_holds_its_rate_up_and_down(sites: Sites) -> None:
    """The thin end sends, then receives; the other end's link is open."""
    sites.shape("one", RATE_MBIT)
    for sender, receiver in (("one", "two"), ("two", "one")):
        before = sites.carried_bytes("one")
        listening = _listening(sites, receiver)
        took_s = float(_told(_start(sites, sender, SEND, sites.address(receiver))))
        assert _told(listening) == str(NUM_BYTES)
        # Headers make it longer than what is sent, and a busy machine longer still.
        ideal_s = 8 * NUM_BYTES / (RATE_MBIT * 1e6)
        assert ideal_s <= took_s < 8 * ideal_s
        carried = [b - a for a, b in zip(before, sites.carried_bytes("one"), strict=True)]
        assert NUM_BYTES <= carried[sender == "two"] < 1.2 * NUM_BYTES


def test_a_link_can_be_reshaped(sites: Sites) -> None:
    for rate_mbit in (RATE_MBIT / 2, 100 * RATE_MBIT):
        sites.shape("one", rate_mbit)
        listening = _listening(sites, "two")
        took_s = float(_told(_start(sites, "one", SEND, sites.address("two"))))
        _told(listening)
        assert (took_s >= 2 * 8 * NUM_BYTES / (RATE_MBIT * 1e6)) == (rate_mbit < RATE_MBIT)


@pytest.fixture
def far_sites() -> Iterator[Sites]:
    require_sites()
    with Sites(["one", "two"], delay_ms=DELAY_MS) as made:
        yield made


def test_a_round_trip_between_sites_takes_twice_their_delay(far_sites: Sites) -> None:
    listening = _listening(far_sites, "two", ECHO)
    round_trip_s = float(_told(_start(far_sites, "one", TALK, far_sites.address("two"))))
    _told(listening)
    assert 2 * DELAY_MS / 1000 <= round_trip_s < 6 * DELAY_MS / 1000
    assert 2 * DELAY_MS / 1000 <= far_sites.round_trip_s("two", "one") < 6 * DELAY_MS / 1000


def test_a_delay_takes_nothing_from_the_rate(far_sites: Sites) -> None:
    """A stream that many round trips would be too slow for, over a thin link and an open one."""
    for rate_mbit in (RATE_MBIT, 50 * RATE_MBIT):
        far_sites.shape("one", rate_mbit)
        listening = _listening(far_sites, "two")
        took_s = float(_told(_start(far_sites, "one", SEND, far_sites.address("two"))))
        assert _told(listening) == str(NUM_BYTES)
        ideal_s = 8 * NUM_BYTES / (rate_mbit * 1e6)
        # A few round trips until TCP has found the rate.
        assert ideal_s <= took_s < 8 * ideal_s + 20 * DELAY_MS / 1000


def test_what_is_far_can_be_cut_off(far_sites: Sites) -> None:
    listening = _listening(far_sites, "two")
    far_sites.cut("one")
    assert _told(_start(far_sites, "one", DIAL, far_sites.address("two"), "0.3")) == "TimeoutError"
    far_sites.mend("one")
    assert _told(_start(far_sites, "one", DIAL, far_sites.address("two"), "30")) == "connected"
    assert _told(listening) == "0"


def test_what_is_cut_off_is_reached_again_when_mended(sites: Sites) -> None:
    listening = _listening(sites, "two")
    sites.cut("one")
    assert _told(_start(sites, "one", DIAL, sites.address("two"), "0.3")) == "TimeoutError"
    sites.mend("one")
    assert _told(_start(sites, "one", DIAL, sites.address("two"), "30")) == "connected"
    assert _told(listening) == "0"


def test_a_site_has_no_way_out(sites: Sites) -> None:
    assert _told(_start(sites, "one", DIAL, "192.0.2.1", "5")) == "OSError"


def test_a_site_is_found_by_its_own_host_name(sites: Sites) -> None:
    """As programs do that tell others where they are."""
    code = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    assert _told(_start(sites, "two", code)) == sites.address("two")


def test_nothing_stays_behind_when_who_made_them_is_killed(tmp_path: Path) -> None:
    require_sites()
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", MAKE]
    maker = subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=child_environment(), text=True)
    assert maker.stdout is not None
    sites = [Path("/proc") / pid for pid in maker.stdout.readline().split()]
    # Of both sites, both delay lines and the switch.
    holders = _children(maker.pid)
    assert len(holders) == 5
    assert set(sites) < set(holders)
    assert len(_delay_lines(maker.pid)) == 2
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=30)
    give_up_s = time.monotonic() + 30
    # A namespace is gone with the last process in it.
    while any(_lives(holder) for holder in holders):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def test_a_delay_line_that_ends_is_told(far_sites: Sites) -> None:
    far_sites.require_alive()
    line = _delay_lines(os.getpid())[0]
    os.kill(int(line.name), signal.SIGKILL)
    give_up_s = time.monotonic() + 30
    while _lives(line):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    with pytest.raises(DilocoError, match=r"the delay line of one has ended \(exit code -9\)"):
        far_sites.require_alive()


def test_no_device_of_a_link_speaks_for_itself(far_sites: Sites) -> None:
    """IPv6 has the kernel solicit routers, which would be traffic."""
    (pid,) = (word for word in far_sites.words("one") if word.isdigit())
    for process in (Path("/proc") / pid, *_delay_lines(os.getpid())):
        addresses = (process / "net" / "if_inet6").read_text("ascii").splitlines()
        assert all(line.split()[-1] == "lo" for line in addresses)


def _children(pid: int) -> list[Path]:
    stats = Path("/proc").glob("[0-9]*/stat")
    parents = {stat.parent: _parent(stat) for stat in stats}
    return [process for process, parent in parents.items() if parent == pid]


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text("utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return 0  # It has ended meanwhile.


def _delay_lines(pid: int) -> list[Path]:
    """In the order of the sites."""
    children = sorted(_children(pid), key=lambda process: int(process.name))
    return [each for each in children if b"harness.delayline" in (each / "cmdline").read_bytes()]


def _lives(process: Path) -> bool:
    try:
        return "\nState:\tZ" not in (process / "status").read_text("utf-8")
    except OSError:
        return False


def test_a_site_that_cannot_be_made_leaves_no_pipe_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_sites()
    unshare = tmp_path / "unshare"
    # A namespace can be made, but nobody can hold it.
    unshare.write_text('#!/bin/sh\ntest "$4" != sh\n', encoding="utf-8")
    unshare.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    with (
        pytest.raises(SettingsError, match="a site could not be made") as told,
        Sites(["one"]),
    ):
        pass
    # What was raised still holds the process that did not start.
    assert told.value.__traceback__ is not None
    assert len(list(descriptors.iterdir())) == before


def test_who_is_not_root_is_told_what_to_do() -> None:
    code = (
        "import os, harness.sites as s; os.geteuid() or os.setuid(65534); print(s.why_no_sites())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True
    )
    assert "takes root: run it with sudo" in done.stdout
