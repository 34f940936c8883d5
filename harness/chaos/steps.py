"""The program of a chaos run: any program, with a gate and a brake before each step and a stamp
after it.

The stamps of all its processes, those that were killed too, tell who made a step when; the gates
hold training where faults take longer than their stretch of the budget, and learners that are back
before their time; the brakes make hardware slower than it is. A door, before the program is
handed out and so before its learner joins, keeps away whoever is not to be seen yet.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fragments.runspec import ProgramSettings, RunSpec
from harness.gated import Gate, gate_steps
from harness.programs import load_program
from learner.program import Program

FACTORY = "harness.chaos.steps:build"

_DOORS = "doors"
_WARM_UP = 1
"""Calls of `step` before the first step: a learner's warm-up, whose result it throws away."""


def stamped(program: ProgramSettings, directory: Path) -> ProgramSettings:
    """The settings of the same program, which stamps its steps in `directory`."""
    inner = {"factory": program.factory, "settings": program.settings}
    return ProgramSettings(
        factory=FACTORY, settings={"directory": str(directory.absolute()), "program": inner}
    )


def build(settings: dict[str, Any], data: str | None, seed: int) -> Program:
    """The program within, gated and stamped, once its door is open.

    Raises:
        SettingsError, DataError: as `load_program` does.
    """
    spec = RunSpec(seed=seed, program=ProgramSettings.model_validate(settings["program"]))
    program = load_program(spec, data)
    directory, pid = Path(settings["directory"]), os.getpid()
    _brake_steps(program, _Brake(directory, pid))
    gate_steps(program, Gate(directory, pid))
    Gate(directory / _DOORS, pid).wait()
    return program


class _Brake:
    """The least time from one step to the next of a process, from either side."""

    def __init__(self, directory: Path, pid: int) -> None:
        self._path = directory / f"{pid}.slow"

    def set(self, least_s: float) -> None:
        """0 for none."""
        if least_s == 0:
            self._path.unlink(missing_ok=True)
            return
        part = self._path.with_suffix(".part")
        part.write_text(repr(least_s), encoding="utf-8")
        part.replace(self._path)

    def get(self) -> float:
        """What was set last."""
        try:
            return float(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return 0.0


def _brake_steps(program: Any, brake: _Brake) -> None:
    step, began_s = program.step, -math.inf

    def braked(*arguments: Any) -> Any:
        nonlocal began_s
        time.sleep(max(0.0, began_s + brake.get() - time.monotonic()))
        began_s = time.monotonic()
        return step(*arguments)

    program.step = braked


class Steps:
    """The stamps, gates and brakes of all processes of a run, from outside."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: set[int] = set()
        self._returning: set[int] = set()
        self._shut: dict[int, int] = {}
        self._outside: set[int] = set()
        self._slowed: dict[int, float] = {}

    def count(self, pid: int) -> int:
        """Calls of `step` that a process has made, its warm-up included."""
        return self._gate(pid).count()

    def total(self) -> int:
        """The same, of all processes."""
        return sum(path.stat().st_size for path in self._directory.glob("*.stamps")) // 8

    def times(self, pid: int) -> list[float]:
        """When a process made its steps, on the machine's monotonic clock."""
        return self._gate(pid).stamps()[_WARM_UP:]

    def hold(self, pids: set[int]) -> None:
        """These make no further step for now, all others do but those that return."""
        self._held = set(pids)
        self._shut_gates()

    def hold_back(self, outside: set[int], returning: set[int]) -> None:
        """Those outside do not join yet, and those that return warm up and make no step yet; none
        but these is held back any more.
        """
        doors = self._directory / _DOORS
        for pid in outside - self._outside:
            doors.mkdir(exist_ok=True)
            Gate(doors, pid).shut()
        for pid in self._outside - outside:
            Gate(doors, pid).open()
        self._outside, self._returning = set(outside), set(returning)
        self._shut_gates()

    def _shut_gates(self) -> None:
        shut = dict.fromkeys(self._returning, _WARM_UP) | dict.fromkeys(self._held, 0)
        for pid, after in shut.items():
            if self._shut.get(pid) != after:
                self._gate(pid).shut(after)
        for pid in self._shut.keys() - shut.keys():
            self._gate(pid).open()
        self._shut = shut

    def slow(self, least_s: Mapping[int, float]) -> None:
        """These take so long from one step to the next at least, all others as long as they do."""
        for pid in self._slowed.keys() - least_s.keys():
            _Brake(self._directory, pid).set(0.0)
        for pid, each_s in least_s.items():
            if self._slowed.get(pid) != each_s:
                _Brake(self._directory, pid).set(each_s)
        self._slowed = dict(least_s)

    def _gate(self, pid: int) -> Gate:
        return Gate(self._directory, pid)
