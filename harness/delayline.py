"""A delay line between two network devices: what comes in at one leaves at the other, later.

Where the kernel has no queue that delays (tc-netem), a process does it: it takes every Ethernet
frame off one device and puts it on the other when its time has come, in order. It runs, as root,
in the namespace that both devices are in, and ends when its stdin does. The devices must have no
other use: at a bridge, or with an address, the kernel would carry the frames as well.

Frames are taken as the kernel holds them, up to 64 KiB at once and with checksums still to be made,
and go on so (PACKET_VNET_HDR of packet(7)).
"""

from __future__ import annotations

import errno
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field

READY = b"\n"
"""Said on stdout: from here on frames are carried."""

MOST_HELD_BYTES = 64 << 20
"""Each way; what comes on top is lost, as in any router."""

FRAMES_A_TURN = 128
"""At most, of each direction's taking in and of its letting go: neither waits long for the rest."""

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 3
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_LARGEST_FRAME = 10 + (1 << 16) + 64
_BUFFER_BYTES = 8 << 20


@dataclass(slots=True)
class Direction:
    """From one device to the other. Frames are kept with the time at which they are due."""

    source: socket.socket
    sink: socket.socket
    delay_s: float
    _held: deque[tuple[float, bytes]] = field(default_factory=deque)
    _held_bytes: int = 0

    def take_in(self) -> None:
        """The frames that have come, up to a turn's."""
        for _ in range(FRAMES_A_TURN):
            try:
                frame = self.source.recv(_LARGEST_FRAME)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENETDOWN:
                    raise
                # Said once each time the device goes down; when it is up again frames come again.
                return
            if self._held_bytes + len(frame) <= MOST_HELD_BYTES:
                self._held.append((time.monotonic() + self.delay_s, frame))
                self._held_bytes += len(frame)

    def let_go(self) -> float | None:
        """The frames that are due, up to a turn's; seconds until the next is, None for none."""
        for _ in range(FRAMES_A_TURN):
            if not self._held:
                return None
            due_s, frame = self._held[0]
            wait_s = due_s - time.monotonic()
            if wait_s > 0:
                return wait_s
            self._held.popleft()
            self._held_bytes -= len(frame)
            try:
                self.sink.send(frame)
            except OSError:
                # The queue of the device is full, or the device is down: a packet lost.
                continue
        return 0.0 if self._held else None


def carry(one: str, other: str, delay_s: float) -> None:
    """Carries frames between two devices, both ways, until stdin ends.

    Raises:
        OSError: where a device is not there, or may not be read.
    """
    ends = _opened(one), _opened(other)
    ways = Direction(ends[0], ends[1], delay_s), Direction(ends[1], ends[0], delay_s)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    stdin = sys.stdin.buffer
    while True:
        waits_s = [wait_s for way in ways if (wait_s := way.let_go()) is not None]
        came, _, _ = select.select([stdin, *ends], [], [], min(waits_s, default=None))
        if stdin in came:
            return
        for way in ways:
            way.take_in()


def _opened(device: str) -> socket.socket:
    # Without a protocol it hears nothing until it is bound; with one it would hear all devices.
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (_SO_RCVBUFFORCE, _SO_SNDBUFFORCE):
        end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    end.bind((device, _ETH_P_ALL))
    end.setblocking(False)
    return end


if __name__ == "__main__":
    carry(sys.argv[1], sys.argv[2], float(sys.argv[3]))
