"""A delay line carries what comes, in order, and outlives its devices' bad times."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from harness import delayline
from harness.environment import child_environment
from tests.support.sites import require_sites

INSIDE = '''
import select, socket, subprocess, sys
from harness.environment import module

def ip(*words):
    subprocess.run(["ip", "link", *words], check=True)

for near, far in (("out0", "in0"), ("in1", "out1")):
    ip("add", near, "type", "veth", "peer", "name", far)
for device in ("out0", "in0", "in1", "out1"):
    ip("set", device, "up")
pipe = subprocess.PIPE
line = subprocess.Popen(module("harness.delayline", "in0", "in1", "0.01"), stdin=pipe, stdout=pipe)
assert line.stdout.readline()
near, far = (socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) for _ in range(2))
near.bind(("out0", 0x88B5))
far.bind(("out1", 0x88B5))

def passes(text):
    """A device takes a moment to carry again, so it is tried for a while."""
    frame = bytes(12) + bytes((0x88, 0xB5)) + text.ljust(46, b".")
    for _ in range(100):
        near.send(frame)
        if select.select([far], [], [], 0.3)[0] and far.recv(2000) == frame:
            return True
    return False

assert passes(b"before")
for device in ("in0", "in1"):
    ip("set", device, "down")
    ip("set", device, "up")
assert passes(b"after")
line.stdin.close()
print(line.wait(30))
'''


def test_a_device_that_was_down_carries_again(tmp_path: Path) -> None:
    require_sites()
    program = tmp_path / "inside.py"
    program.write_text(INSIDE, encoding="utf-8")
    argv = ["unshare", "--net", "--", sys.executable, str(program)]
    done = subprocess.run(
        argv, env=child_environment(), capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_neither_direction_waits_for_all_that_the_other_has() -> None:
    near, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sink, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, source, sink, far:
        for each in (near, source, sink, far):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            each.setblocking(False)
        limit = delayline.FRAMES_A_TURN
        frames = [str(number).encode() for number in range(2 * limit + 5)]
        for frame in frames:
            near.send(frame)
        way = delayline.Direction(source, sink, 0.0)
        way.take_in()
        assert way.let_go() is None
        assert _come(far) == frames[:limit]
        way.take_in()
        way.take_in()
        # There is more that is due: no wait, but a turn of the other direction.
        assert way.let_go() == 0
        assert _come(far) == frames[limit : 2 * limit]
        assert way.let_go() is None
        assert _come(far) == frames[2 * limit :]


def _come(end: socket.socket) -> list[bytes]:
    came: list[bytes] = []
    try:
        while True:
            came.append(end.recv(99))
    except BlockingIOError:
        return came
