"""Supervised child processes: started, watched, restarted to a bound, and ended with the parent.

Every child has a process group of its own (a Ctrl-C in the terminal reaches the parent alone) and
writes to a log file. One of this machine holds the reading end of a pipe as its stdin, which closes
when the parent ends in whatever way, kill -9 included; a child started with `--exit-with-parent`
stops itself then. One that stands still (`pause`) cannot, but it is in the parent's session: when
the parent ends, its group is an orphan with a stopped member, and the kernel hangs it up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from fragments.errors import DilocoError

STOP_GRACE_S = 5.0
"""From SIGTERM to SIGKILL."""

STEADY_S = 30.0
"""Who has run for so long is started again as soon as after a first death."""

LONGEST_PAUSE_S = 5.0
"""Before a restart: doubled from death to death up to this."""

EXIT_GRACES_S = (2.5, 1.5)
"""The same on the way out, for the others and for those that outlive them: when the parent was told
to stop, it has 5 s for all of it."""

_NOT_WORTH_A_RESTART = frozenset({0, 2, 4, 5})
"""Exit codes that a second try would end with too: done, usage, refused, run directory."""


class EventKind(StrEnum):
    """What happened to a process."""

    STARTED = "started"
    KILLED = "killed"
    DIED = "died"
    PAUSED = "paused"
    CONTINUED = "continued"
    RESTARTED = "restarted"
    REJOINED = "rejoined"
    GAVE_UP = "gave_up"
    ENDED = "ended"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to the process `name`, `at_s` seconds after the supervisor's start.

    `exit_code` is negative for a signal, None where the process did not end.
    """

    at_s: float
    name: str
    kind: EventKind
    pid: int
    exit_code: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run as `name`; `max_restarts` bounds the restarts after unexpected deaths.

    `outlives`: on the way out it is stopped after the others, which want to take leave of it.
    """

    name: str
    argv: tuple[str, ...]
    log: Path
    environ: Mapping[str, str]
    max_restarts: int = 0
    outlives: bool = False


class Running(Protocol):
    """A process of a command, wherever it runs."""

    @property
    def pid(self) -> int:
        """Its id, which no other process of the run has or had."""

    @property
    def handle(self) -> str:
        """What a person finds it by."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit code, once it has ended; subprocess.TimeoutExpired after the time."""

    def send(self, number: signal.Signals) -> None:
        """To it and all that it has started."""

    def release(self) -> None:
        """It has ended: let go of what it held here."""


class LocalProcess:
    """A `Running` of this machine, with a process group of its own and a pipe as its stdin."""

    def __init__(self, command: Command) -> None:
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("ab") as log:
            self._process = subprocess.Popen(
                command.argv,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(command.environ),
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """See `Running`."""
        return self._process.pid

    @property
    def handle(self) -> str:
        """See `Running`."""
        return str(self.pid)

    def poll(self) -> int | None:
        """See `Running`."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """See `Running`."""
        return self._process.wait(timeout_s)

    def send(self, number: signal.Signals) -> None:
        """See `Running`. While it is not reaped, its id is its own."""
        if self._process.poll() is not None:
            return
        if number is signal.SIGTERM:
            # What it has started, it ends itself.
            self._process.terminate()
        else:
            os.killpg(self._process.pid, number)

    def release(self) -> None:
        """See `Running`."""
        if self._process.stdin is not None:
            self._process.stdin.close()


@dataclass(slots=True)
class _Child:
    command: Command
    process: Running
    began_s: float
    restarts: int = 0
    failures: int = 0
    restart_at_s: float | None = None
    exit_code: int | None = None
    killed: bool = False
    away_s: float = 0.0


@dataclass(slots=True)
class Supervisor:
    """Owns children by name. Not thread-safe: one thread calls it, often (`poll`).

    As a context manager it ends all its children on the way out, and nothing else.
    """

    restart_delay_s: float = 0.5
    clock: Callable[[], float] = time.monotonic
    spawn: Callable[[Command], Running] = LocalProcess
    handle_kind: str = "process id"
    """What the handles of its processes are."""
    events: list[Event] = field(default_factory=list)
    _children: dict[str, _Child] = field(default_factory=dict)
    _started_s: float = -1.0

    def __post_init__(self) -> None:
        self._started_s = self.clock()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_exc: object) -> None:
        for outlives, grace_s in zip((False, True), EXIT_GRACES_S, strict=True):
            wave = [n for n, c in self._children.items() if c.command.outlives is outlives]
            self.stop(wave, grace_s)

    @property
    def now_s(self) -> float:
        """Seconds since the supervisor's start, the time base of its events."""
        return self.clock() - self._started_s

    def start(self, command: Command) -> None:
        """Starts a child; its name must be free or its former bearer ended."""
        if self.running(command.name):
            raise ValueError(f"{command.name} is running already")
        self._children[command.name] = _Child(command, self.spawn(command), self.now_s)
        self.note(command.name, EventKind.STARTED)

    def poll(self) -> None:
        """Notices who has ended and starts again whose time has come."""
        for name, child in self._children.items():
            if child.exit_code is None and (code := child.process.poll()) is not None:
                self._on_end(name, child, code)
            if child.restart_at_s is not None and self.now_s >= child.restart_at_s:
                child.restart_at_s = None
                child.process, child.began_s = self.spawn(child.command), self.now_s
                child.exit_code, child.killed, child.away_s = None, False, 0.0
                handle = f"{self.handle_kind} {child.process.handle}"
                detail = f"restart {child.restarts}, {handle}"
                self.note(name, EventKind.RESTARTED, detail=detail)

    def kill(self, name: str, why: str, away_s: float = 0.0) -> None:
        """kill -9 of a running child, as a drill: it is started again like one that died, without
        longer pauses from one time to the next, `away_s` later than it would be.
        """
        child = self._children[name]
        if child.process.poll() is None:
            self.expect_kill(name, why, away_s)
            child.process.send(signal.SIGKILL)

    def expect_kill(self, name: str, why: str, away_s: float = 0.0) -> None:
        """A running child is about to kill itself, as `kill` would."""
        child = self._children[name]
        child.killed, child.away_s = True, away_s
        self.note(name, EventKind.KILLED, detail=why)

    def pause(self, name: str) -> None:
        """SIGSTOP to a running child: it stands still until `resume`, `kill` or `stop`."""
        self._children[name].process.send(signal.SIGSTOP)
        self.note(name, EventKind.PAUSED)

    def resume(self, name: str) -> None:
        """SIGCONT to a child that was paused."""
        self._children[name].process.send(signal.SIGCONT)
        self.note(name, EventKind.CONTINUED)

    def running(self, name: str) -> bool:
        """Is it alive, as of the last `poll`?"""
        child = self._children.get(name)
        return child is not None and child.exit_code is None

    def settled(self, name: str) -> bool:
        """Has it ended for good, with no restart to come?"""
        child = self._children[name]
        return child.exit_code is not None and child.restart_at_s is None

    def pids(self) -> dict[str, int]:
        """Process ids of those that run, by name."""
        return {n: c.process.pid for n, c in self._children.items() if c.exit_code is None}

    def handles(self) -> dict[str, str]:
        """What a person finds those by that run, by name."""
        return {n: c.process.handle for n, c in self._children.items() if c.exit_code is None}

    def exit_code(self, name: str) -> int | None:
        """Its last exit code, None while it runs."""
        return self._children[name].exit_code

    def restarts(self, name: str) -> int:
        """How often it was started again."""
        return self._children[name].restarts

    def require_alive(self, name: str) -> None:
        """Raises DilocoError, with the child's own last words, if it has ended for good."""
        if self.settled(name):
            child = self._children[name]
            log = child.command.log
            words = last_words(log) or f"its log is {log}"
            raise DilocoError(f"{name} ended with exit code {child.exit_code}: {words}")

    def stop(self, names: Iterable[str], grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM to the named children, SIGKILL to those that still run `grace_s` later."""
        chosen = [self._children[name] for name in names]
        for child in chosen:
            child.restart_at_s = None
            if child.process.poll() is None:
                child.process.send(signal.SIGTERM)
                # One that was paused hears of it.
                child.process.send(signal.SIGCONT)
        deadline_s = self.clock() + grace_s
        for child in chosen:
            if child.exit_code is not None:
                continue
            forced = not _wait(child.process, deadline_s - self.clock())
            if forced:
                child.process.send(signal.SIGKILL)
            child.exit_code = child.process.wait()
            child.process.release()
            detail = f"did not stop within {grace_s:g} s" if forced else ""
            self.note(child.command.name, EventKind.STOPPED, child.exit_code, detail)

    def note(
        self, name: str, kind: EventKind, exit_code: int | None = None, detail: str = ""
    ) -> None:
        """Records an event of a child, now."""
        pid = self._children[name].process.pid
        self.events.append(Event(round(self.now_s, 3), name, kind, pid, exit_code, detail))

    def _on_end(self, name: str, child: _Child, code: int) -> None:
        child.process.release()
        child.exit_code = code
        if code == 0:
            self.note(name, EventKind.ENDED, code)
            return
        words = "killed by the drill" if child.killed else last_words(child.command.log)
        self.note(name, EventKind.DIED, code, words)
        if code in _NOT_WORTH_A_RESTART or child.restarts >= child.command.max_restarts:
            self.note(name, EventKind.GAVE_UP, code, f"after {child.restarts} restarts")
            return
        if child.killed or self.now_s - child.began_s >= STEADY_S:
            child.failures = 0
        pause_s = min(LONGEST_PAUSE_S, self.restart_delay_s * 2 ** min(child.failures, 16))
        child.restart_at_s = self.now_s + pause_s + child.away_s
        child.restarts += 1
        child.failures += not child.killed


def _wait(process: Running, timeout_s: float) -> bool:
    """Has the process ended within the time?"""
    try:
        process.wait(max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        return False
    return True


def last_words(log: Path) -> str:
    """The last line of a log, at most 300 characters of it; nothing where it is no sentence.

    A process that ends for a reason says it in a plain line; a structured event that happens to
    be the last one is not why it died.
    """
    try:
        with log.open("rb") as lines:
            tail = deque((line for line in lines if line.strip()), maxlen=1)
    except OSError:
        return ""
    text = tail[0].decode(errors="replace").strip() if tail else ""
    return "" if text.startswith("{") else text[:300]
