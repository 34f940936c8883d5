"""The program of a chaos run: any program, with a gate and a brake before each step and a stamp
after it.

The stamps of all its processes, those that were killed too, tell who made a step when; the gates
hold training where faults take longer than their stretch of the budget; the brakes make hardware
slower than it is.
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


def stamped(program: ProgramSettings, directory: Path) -> ProgramSettings:
    """The settings of the same program, which stamps its steps in `directory`."""
    inner = {"factory": program.factory, "settings": program.settings}
    return ProgramSettings(
        factory=FACTORY, settings={"directory": str(directory.absolute()), "program": inner}
    )


def build(settings: dict[str, Any], data: str | None, seed: int) -> Program:
    """The program within, gated and stamped.

    Raises:
        SettingsError, DataError: as `load_program` does.
    """
    spec = RunSpec(seed=seed, program=ProgramSettings.model_validate(settings["program"]))
    program = load_program(spec, data)
    directory, pid = Path(settings["directory"]), os.getpid()
    _brake_steps(program, _Brake(directory, pid))
    gate_steps(program, Gate(directory, pid))
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
        self._shut: set[int] = set()
        self._slowed: dict[int, float] = {}

    def count(self, pid: int) -> int:
        """Steps that a process has made."""
        return self._gate(pid).count()

    def total(self) -> int:
        """Steps that all processes have made."""
        return sum(path.stat().st_size for path in self._directory.glob("*.stamps")) // 8

    def times(self, pid: int) -> list[float]:
        """When a process made its steps, on the machine's monotonic clock."""
        return self._gate(pid).stamps()

    def hold(self, pids: set[int]) -> None:
        """These make no further step for now, all others do."""
        for pid in pids - self._shut:
            self._gate(pid).shut()
        for pid in self._shut - pids:
            self._gate(pid).open()
        self._shut = set(pids)

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
