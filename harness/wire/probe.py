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

import faulthandler
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

from pydantic import BaseModel, ConfigDict

ASK = signal.SIGUSR1
INTERVAL_S = 0.1
"""A look costs 3 ms at 50 threads, in which no other Python runs."""

PROBE = "probe"
"""The looking thread's name."""
MOST_PLACES = 2000
"""Places told apart; those beyond are passed over."""

_ROOT = str(Path(__file__).parents[2]) + os.sep
_ROOMS = ("fragments", "outer_server", "learner", "services", "harness", "cli")
_OURS = tuple(f"{_ROOT}{room}{os.sep}" for room in _ROOMS)
_THREAD = re.compile(rb"hread 0x([0-9a-f]+) ")
_FRAME = re.compile(rb'  File "([^"\n]*)", line \S+ in ([^\n]*)')
COMPILED = "compiled by jax"
_COMPILED_THREADS = "tf_XLA"
"""How the names of the threads begin that run it. Others of jax have no name and bear the
process's; a look with perf found compiled code in nearly all of their time."""

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
        super().__init__(name=PROBE, daemon=True)
        self._report = report
        self._cpu_s: dict[str, float] = {}
        self._seen: dict[str, dict[str, float]] = {}
        self._places = 0
        self._stacks = Stacks()
        self._process_name = Path("/proc/self/comm").read_text(encoding="utf-8")
        self._seen_s: dict[int, float] = {}
        self._names: dict[int, str] = {}

    def run(self) -> None:
        """Look by look; a wait for ASK is the pause between two."""
        while True:
            asked = signal.sigtimedwait([ASK], INTERVAL_S)
            self._look()
            if asked is not None:
                report = ProbeReport(
                    cpu_s=self._cpu_s, seen=self._seen, connections=tuple(connections())
                )
                draft = self._report.with_suffix(".part")
                draft.write_text(report.model_dump_json(), encoding="utf-8")
                draft.replace(self._report)

    def _look(self) -> None:
        threads = {thread.native_id: thread for thread in threading.enumerate()}
        stacks = self._stacks.take()
        seen_s: dict[int, float] = {}
        for thread_id in _thread_ids():
            try:
                now_s = time.clock_gettime((~thread_id << 3) | _THREAD_CLOCK)
            except OSError:  # it has ended since it was listed
                continue
            seen_s[thread_id] = now_s
            thread = threads.get(thread_id)
            name = self._native(thread_id) if thread is None else _kind(thread.name)
            used_s = now_s - self._seen_s.get(thread_id, 0.0)
            self._cpu_s[name] = self._cpu_s.get(name, 0.0) + used_s
            stack = None if thread is None else stacks.get(thread.ident or 0)
            if stack is None:
                continue
            inner, where = place(stack)
            if inner in _WAITS_FOR_COMPILED:
                self._book(COMPILED, f"{name}: {where}", 1.0)
            elif used_s > 0 and inner not in _WAITS:
                self._book(name, where, used_s)
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
            is_compiled = name.startswith(_COMPILED_THREADS) or name == self._process_name
            self._names[thread_id] = COMPILED if is_compiled else f"native {_kind(name.strip())}"
        return self._names[thread_id]


class Stacks:
    """The stacks of all Python threads, as text.

    Written by `faulthandler`, which touches no object: with CPython 3.11, frames from
    `sys._current_frames` that were walked while their threads ran on ended the process in a
    segmentation fault, and garbage collection in the middle of it blocked it for good.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("stacks")

    def take(self) -> dict[int, bytes]:
        """By the thread's identity: a line for each frame, the innermost first."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self._file, all_threads=True)
        text = os.pread(self._file, os.fstat(self._file).st_size, 0)
        blocks = ((_THREAD.search(block), block) for block in text.split(b"\n\n"))
        return {int(found[1], 16): block for found, block in blocks if found is not None}


def place(stack: bytes) -> tuple[str, str]:
    """The innermost function of a stack; and as text the innermost one of this project, with what
    it has called elsewhere.
    """
    inner = ("", "?")
    for found in _FRAME.finditer(stack):
        path, name = found[1].decode(errors="replace"), found[2].decode(errors="replace")
        is_ours = path.startswith(_OURS)
        text = f"{path.removeprefix(_ROOT) if is_ours else _short(path)}:{name}"
        if not inner[0]:
            inner = (name, text)
        if is_ours:
            return inner[0], text if inner[1] == text else f"{text} > {inner[1]}"
    return inner


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])


def _kind(name: str) -> str:
    """A thread's name without its number: what a pool's threads have in common."""
    return re.sub(r"[-_/ ]?\d+( \(.*\))?$", "", name) or name


def _thread_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]


def connections() -> Iterator[Connection]:
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
