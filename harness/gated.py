"""The reference program with a gate before each step, and a time stamp after it.

For measuring processes that take turns: a process whose gate is shut steps no further, while its
other threads go on. `python -m harness.gated JSON` is a process that steps the program of a run and
does nothing else, in the way in which a learner steps it.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

FACTORY = "harness.gated:build"
_POLL_S = 0.01
_STAMP = struct.Struct("<d")


def settings(directory: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """The program's settings: where gates and stamps are, and the reference program's own."""
    return {"directory": str(directory.absolute()), "reference": reference}


class Gate:
    """The gate of one process, from either side; open until shut."""

    def __init__(self, directory: Path, pid: int) -> None:
        self._shut = directory / f"{pid}.shut"
        self._ready = directory / f"{pid}.ready"
        self._stamps = directory / f"{pid}.stamps"

    def shut(self, after: int = 0) -> None:
        """The step that is being dispatched is the last one, once the process has made `after`."""
        part = self._shut.with_suffix(".part")
        part.write_text(str(after), encoding="ascii")
        part.replace(self._shut)

    def open(self) -> None:
        """Step on."""
        self._shut.unlink(missing_ok=True)

    def wait(self) -> None:
        """Returns once it is open, or whoever shut it is gone."""
        parent = os.getppid()
        while self._is_shut() and os.getppid() == parent:
            time.sleep(_POLL_S)

    def arrive(self) -> None:
        """All that precedes the first step is done."""
        self._ready.touch()

    @property
    def has_arrived(self) -> bool:
        """Whether the process said so."""
        return self._ready.exists()

    def stamp(self) -> None:
        """A step was dispatched, now."""
        with self._stamps.open("ab", buffering=0) as stamps:
            stamps.write(_STAMP.pack(time.monotonic()))

    def count(self) -> int:
        """How many steps were dispatched."""
        return self._stamps.stat().st_size // _STAMP.size if self._stamps.exists() else 0

    def stamps(self) -> list[float]:
        """When steps were dispatched, on the machine's monotonic clock."""
        whole = self._stamps.read_bytes() if self._stamps.exists() else b""
        return [at_s for (at_s,) in _STAMP.iter_unpack(whole[: len(whole) // 8 * 8])]

    def _is_shut(self) -> bool:
        try:
            after = int(self._shut.read_text(encoding="ascii"))
        except FileNotFoundError:
            return False
        return self.count() >= after


def build(settings: dict[str, Any], data: str | None, seed: int) -> Any:
    """The reference program, gated.

    Raises:
        DataError, pydantic.ValidationError: as the reference program's factory does.
    """
    from learner.reference.program import build as build_reference

    program: Any = build_reference(settings["reference"], data, seed)
    gate_steps(program, Gate(Path(settings["directory"]), os.getpid()))
    return program


def gate_steps(program: Any, gate: Gate) -> None:
    """Has each step of a program wait for the gate and leave a stamp."""
    step = program.step

    def gated(*arguments: Any) -> Any:
        gate.wait()
        result = step(*arguments)
        gate.stamp()
        return result

    program.step = gated


def _step_alone(request: str) -> None:
    """Steps until the parent ends or says so; one step is dispatched ahead, as by a learner."""
    import jax.numpy as jnp

    from harness.programs import load_program
    from harness.warm import asked_of
    from learner.program import Shard

    program = load_program(*asked_of(request))
    params = program.init_params(0)
    inner, shard, previous, cursor = program.init_inner(params), Shard(0, 1), None, 0
    while True:
        batch = program.batch(shard, cursor)
        result = program.step(params, inner, batch, jnp.float32(0))
        params, inner, cursor = result.params, result.inner, cursor + 1
        if previous is not None:
            float(previous)
        previous = result.loss


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _step_alone(sys.argv[1])
