"""What a running process has cost, from outside: /proc, and its probe's report. Linux only."""

from __future__ import annotations

import os
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12
"""Positions after the command's name in /proc/PID/stat (proc(5): fields 14 and 15)."""


def cpu_s(pid: int) -> float:
    """Processor seconds, user and system, of all threads of a process since its start."""
    # The command's name comes second, in brackets, and may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK_S


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had resident since its start."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no VmHWM")


def available_bytes() -> int:
    """Memory that new processes can have without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
