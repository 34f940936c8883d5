"""What the process's allocator is told, so that freed memory does not make up a second model.

A fragment value lives until its next version is there. jax allocates it aligned, for which glibc
before 2.38 seldom takes the hole that one of the same size has left (its bug 14581), and smaller
things settle in there. So what is large is mapped on its own and given back whole; what is smaller
shares one arena, and what is free of that is given back.

What is large depends on the kernel's pages. Where the allocator asks for large ones
(`harness.environment` sets that for every process that it starts, docker/Dockerfile for every
container), it is what fills one of 2 MiB: `diloco bench` finds the server at 3.55 models and
learners at 1.3 then. With 1 MiB the server had 3.5, and both took a tenth more processor time,
for payloads and what gRPC makes of them have just above 1 MiB. Without large pages clearing
memory page by page costs a learner a quarter more time a step, so it is what has 8 MiB and more.
By the allocator's own rules the server had 8.1 models and learners 2.9.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.environment import LARGE_PAGES

LOOK_S = 0.05
"""A look costs 20 µs."""

GROWTH_SHARE = 128
GROWTH_LEAST_BYTES = 8 << 20
"""How much a process may grow before it is trimmed: a 128th of it, or this. What is given back must
be cleared by the kernel when it is used again, so it is not done for less."""


_STATM = Path("/proc/self/statm")
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""In malloc.h."""

_MAPPED_BYTES = 2 << 20
_MAPPED_BYTES_SMALL_PAGES = 8 << 20


def keep_trim() -> None:
    """For a process that holds a model, before it has threads: from now on one looks after its
    memory. Nothing happens where the allocator is not glibc's.
    """
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "malloc_trim"):
        return
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_MMAP_THRESHOLD, mapped_bytes(os.environ))
    trimmer = Trimmer(resident_bytes, lambda: libc.malloc_trim(0))
    threading.Thread(target=trimmer.run, name="trim", daemon=True).start()


def mapped_bytes(environ: Mapping[str, str]) -> int:
    """From which size on an allocation is mapped on its own, in a process of that environment."""
    has_large_pages = LARGE_PAGES in environ.get("GLIBC_TUNABLES", "").split(":")
    return _MAPPED_BYTES if has_large_pages else _MAPPED_BYTES_SMALL_PAGES


def settle() -> None:
    """For a process that has loaded and compiled all that it will keep: its collector need not look
    at that again and again.
    """
    gc.collect()
    gc.freeze()


class Trimmer:
    """Trims when the process has grown since it was last trimmed.

    Args:
        resident_bytes: memory that the process has now.
        trim: gives back what is free.
    """

    def __init__(self, resident_bytes: Callable[[], int], trim: Callable[[], object]) -> None:
        self._resident_bytes = resident_bytes
        self._trim = trim
        self._least_bytes = resident_bytes()

    def run(self) -> None:
        """Look until the process ends."""
        pause = threading.Event()
        while True:
            pause.wait(LOOK_S)
            self.look()

    def look(self) -> None:
        """Trim, if it is time to."""
        now_bytes = self._resident_bytes()
        self._least_bytes = min(self._least_bytes, now_bytes)
        allowed_bytes = max(now_bytes // GROWTH_SHARE, GROWTH_LEAST_BYTES)
        if now_bytes - self._least_bytes > allowed_bytes:
            self._trim()
            self._least_bytes = self._resident_bytes()


def resident_bytes() -> int:
    """Of this process, from /proc."""
    return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
