"""The program of a chaos run: any program, with a gate before each step and a stamp after it.

The stamps of all its processes, those that were killed too, tell who made a step when; the gates
hold training where faults take longer than their stretch of the budget.
"""

from __future__ import annotations

import os
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
    gate_steps(program, Gate(Path(settings["directory"]), os.getpid()))
    return program


class Steps:
    """The stamps and gates of all processes of a run, from outside."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shut: set[int] = set()

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

    def _gate(self, pid: int) -> Gate:
        return Gate(self._directory, pid)
