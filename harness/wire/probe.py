"""Runs a module as `python -m` does and watches its process from within.

    python -m harness.wire.probe REPORT MODULE ARGUMENTS...

A thread looks at all others every INTERVAL_S and books the processor time that each has used since
the last look to what it is in: a Python thread's innermost function of this project (and, where
that has called into something else, the function there), or a native thread's name. On SIGUSR1 it
writes a `ProbeReport` to REPORT. Compiled functions that hold the interpreter's lock delay a look,
so that their time is booked to what follows them.

What crosses the network is counted where it is exact, and at no cost: by the kernel, for each
connection of the process. Linux only.
"""

from __future__ import annotations

import gc
import os
import re
import runpy
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from pydantic import BaseModel, ConfigDict

ASK = signal.SIGUSR1
INTERVAL_S = 0.02
MOST_PLACES = 2000
"""Places told apart; time in others is booked to "elsewhere"."""

_ROOMS = ("fragments", "outer_server", "learner", "services", "harness", "cli")
_THREAD_CLOCK = 6
"""Of the thread id T, (~T << 3) | 6 is the clock of its processor time: the kernel's own numbering
(include/linux/posix-timers.h), which `pthread_getcpuclockid` returns. Unlike that, it takes the id
of a thread that has ended meanwhile, and says EINVAL."""

_TCP_INFO_BYTES = 192
_ACKED_AND_RECEIVED = 120
"""Offset of the u64 pair tcpi_bytes_acked, tcpi_bytes_received in struct tcp_info
(include/uapi/linux/tcp.h)."""


class Connection(BaseModel):
    """A TCP connection of a process; bytes are those of its streams, headers of TCP left out."""

    model_config = ConfigDict(frozen=True)

    local_port: int
    peer_port: int
    bytes_in: int
    bytes_out: int


class ProbeReport(BaseModel):
    """A process so far. `cpu_s`: processor seconds by place, "thread | place"."""

    model_config = ConfigDict(frozen=True)

    cpu_s: dict[str, float]
    connections: tuple[Connection, ...]


class Probe(threading.Thread):
    """Looks and answers until the process ends. ASK must be blocked in every thread."""

    def __init__(self, report: Path) -> None:
        super().__init__(name="probe", daemon=True)
        self._report = report
        self._booked: dict[str, float] = {}
        self._seen_s: dict[int, float] = {}
        self._names: dict[int, str] = {}

    def run(self) -> None:
        """Look by look; a wait for ASK is the pause between two."""
        while True:
            asked = signal.sigtimedwait([ASK], INTERVAL_S)
            self._look()
            if asked is not None:
                report = ProbeReport(cpu_s=self._booked, connections=tuple(_connections()))
                draft = self._report.with_suffix(".part")
                draft.write_text(report.model_dump_json(), encoding="utf-8")
                draft.replace(self._report)

    def _look(self) -> None:
        frames = _frames()
        threads = {thread.native_id: thread for thread in threading.enumerate()}
        seen_s: dict[int, float] = {}
        for thread_id in _thread_ids():
            try:
                now_s = time.clock_gettime((~thread_id << 3) | _THREAD_CLOCK)
            except OSError:  # it has ended since it was listed
                continue
            seen_s[thread_id] = now_s
            used_s = now_s - self._seen_s.get(thread_id, 0.0)
            if used_s <= 0:
                continue
            thread = threads.get(thread_id)
            frame = None if thread is None else frames.get(thread.ident or 0)
            if thread is None or frame is None:
                self._book(f"native {self._native(thread_id)} |", used_s)
            else:
                self._book(f"{_kind(thread.name)} | {place(frame)}", used_s)
        self._seen_s = seen_s

    def _book(self, where: str, used_s: float) -> None:
        if where not in self._booked and len(self._booked) >= MOST_PLACES:
            where = "elsewhere |"
        self._booked[where] = self._booked.get(where, 0.0) + used_s

    def _native(self, thread_id: int) -> str:
        if thread_id not in self._names:
            try:
                name = Path(f"/proc/self/task/{thread_id}/comm").read_text(encoding="utf-8")
            except OSError:
                name = "ended"
            self._names[thread_id] = _kind(name.strip())
        return self._names[thread_id]


def _frames() -> dict[int, FrameType]:
    """The innermost frame of each Python thread, by its identity.

    Without garbage collection: one that begins inside `sys._current_frames` and gives way to
    another thread blocks the process for good (CPython issue 106883; seen with 3.11.7).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def place(frame: FrameType) -> str:
    """The innermost function of this project in a stack, and what it has called elsewhere."""
    inner: FrameType = frame
    ours: FrameType | None = frame
    while ours is not None and _module(ours).partition(".")[0] not in _ROOMS:
        ours = ours.f_back
    if ours is None:
        return _function(inner)
    return _function(ours) if ours is inner else f"{_function(ours)} > {_function(inner)}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _function(frame: FrameType) -> str:
    return f"{_module(frame)}.{frame.f_code.co_qualname}"


def _kind(name: str) -> str:
    """A thread's name without its number: what a pool's threads have in common."""
    return re.sub(r"[-_/ ]?\d+( \(.*\))?$", "", name) or name


def _thread_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]


def _connections() -> Iterator[Connection]:
    """The TCP connections of this process."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                yield _connection(copy)
        except OSError:  # closed since it was listed, or no connected TCP socket
            continue


def _connection(tcp: socket.socket) -> Connection:
    """Raises OSError for what is no connected TCP socket."""
    info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    acked, received = struct.unpack_from("QQ", info, _ACKED_AND_RECEIVED)
    return Connection(
        local_port=tcp.getsockname()[1],
        peer_port=tcp.getpeername()[1],
        bytes_in=received,
        bytes_out=acked,
    )


def main(report: str, module: str, *arguments: str) -> None:
    """Runs the module with the arguments, in this process."""
    # Threads inherit it, those of libraries too: only the probe ever takes the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, [ASK])
    Probe(Path(report)).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
