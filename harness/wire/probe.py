"""Runs a module as `python -m` does and watches its process from within.

    python -m harness.wire.probe REPORT MODULE ARGUMENTS...

A thread looks at all others every INTERVAL_S. The processor time that each has used since the last
look is exact. What it was used for is an estimate: a look that finds a thread at work books that
time to its innermost function of this project (and the function elsewhere that this has called),
and whoever reads the report spreads all time of the thread in the same proportions. Work that is
over when the look comes is not lost in this way, and no wait is taken for work. What jax has
compiled runs on threads without Python: its time is spread over those who were seen waiting in jax.

On SIGUSR1 a `ProbeReport` is written to REPORT. What crosses the network is counted where it is
exact, and at no cost: by the kernel, for each connection of the process. Linux only.
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
"""Places told apart; those beyond are passed over."""

_ROOMS = ("fragments", "outer_server", "learner", "services", "harness", "cli")
COMPILED = "compiled by jax"
_COMPILED_THREADS = "tf_XLA"
"""How the names of the threads begin that run it."""

_WAITS_FOR_COMPILED = frozenset({"_value", "block_until_ready"})
_WAITS = frozenset(
    {"wait", "_wait_once", "_blocking", "_worker", "_serve", "channel_spin", "get", "sigtimedwait"}
)
"""Functions, of threading, queues and gRPC, in which a thread waits for others."""

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
    """A process so far.

    `cpu_s`: processor seconds by thread, those of a pool together. `seen`: for each of these, how
    much was found to be in which place.
    """

    model_config = ConfigDict(frozen=True)

    cpu_s: dict[str, float]
    seen: dict[str, dict[str, float]]
    connections: tuple[Connection, ...]


class Probe(threading.Thread):
    """Looks and answers until the process ends. ASK must be blocked in every thread."""

    def __init__(self, report: Path) -> None:
        super().__init__(name="probe", daemon=True)
        self._report = report
        self._cpu_s: dict[str, float] = {}
        self._seen: dict[str, dict[str, float]] = {}
        self._places = 0
        self._seen_s: dict[int, float] = {}
        self._names: dict[int, str] = {}

    def run(self) -> None:
        """Look by look; a wait for ASK is the pause between two."""
        while True:
            asked = signal.sigtimedwait([ASK], INTERVAL_S)
            self._look()
            if asked is not None:
                report = ProbeReport(
                    cpu_s=self._cpu_s, seen=self._seen, connections=tuple(_connections())
                )
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
            thread = threads.get(thread_id)
            frame = None if thread is None else frames.get(thread.ident or 0)
            name = self._native(thread_id) if thread is None else _kind(thread.name)
            used_s = now_s - self._seen_s.get(thread_id, 0.0)
            self._cpu_s[name] = self._cpu_s.get(name, 0.0) + used_s
            if frame is None:
                continue
            if frame.f_code.co_name in _WAITS_FOR_COMPILED:
                self._book(COMPILED, f"{name}: {place(frame)}", 1.0)
            elif used_s > 0 and frame.f_code.co_name not in _WAITS:
                self._book(name, place(frame), used_s)
        self._seen_s = seen_s

    def _book(self, name: str, where: str, weight: float) -> None:
        places = self._seen.setdefault(name, {})
        if where not in places:
            if self._places >= MOST_PLACES:
                return
            self._places += 1
        places[where] = places.get(where, 0.0) + weight

    def _native(self, thread_id: int) -> str:
        if thread_id not in self._names:
            try:
                name = Path(f"/proc/self/task/{thread_id}/comm").read_text(encoding="utf-8")
            except OSError:
                name = "ended"
            is_compiled = name.startswith(_COMPILED_THREADS)
            self._names[thread_id] = COMPILED if is_compiled else f"native {_kind(name.strip())}"
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
