"""The parent's end of a process that makes cells of a study (`harness.study_worker`)."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from fragments.errors import DilocoError
from harness.environment import child_environment, module
from harness.study_worker import Answer, Hello
from harness.warm import use_cache
from simulation.study.matrix import Recipe

CACHE = Path("runs/study")
"""Warm checkpoints and compiled steps; everything in it can be made again."""

_OUT_OF_MEMORY: dict[int, str] = {
    signal.SIGKILL: "which is how the kernel ends a process when the machine is out of memory",
    signal.SIGABRT: "which is how compiled code ends when it is out of memory",
}


class Worker:
    """One worker process; use as a context manager. One thread at a time may use it, except that
    any thread may `end` it, which makes a running `run` raise DilocoError.
    """

    def __init__(self, cache: Path) -> None:
        environ = child_environment()
        use_cache(environ, cache / "compiled")
        self._process = subprocess.Popen(
            module("harness.study_worker", str(cache)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
            # A Ctrl-C at the terminal is for the parent, which ends its workers.
            start_new_session=True,
        )
        self.hello = Hello.model_validate_json(self._read())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.close()

    def run(self, recipe: Recipe) -> Answer:
        """Make one cell. Raises DilocoError when the process ended."""
        if self._process.stdin is None:
            raise AssertionError("stdin is a pipe")
        try:
            self._process.stdin.write(recipe.model_dump_json() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise DilocoError(f"its worker process has ended{self._how_ended()}") from error
        return Answer.model_validate_json(self._read())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """May it be given another recipe?"""
        return self._process.poll() is None

    def end(self) -> None:
        """Kill it; a cell under way is lost, and nothing else."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes, once no thread uses them."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _read(self) -> str:
        if self._process.stdout is None:
            raise AssertionError("stdout is a pipe")
        line = self._process.stdout.readline()
        if not line:
            raise DilocoError(f"its worker process has ended{self._how_ended()}")
        return line

    def _how_ended(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return ""
        if code >= 0:
            return f" (exit code {code})"
        why = _OUT_OF_MEMORY.get(-code)
        hint = f", {why}: fewer --workers need less" if why else ""
        return f" (killed by signal {-code}{hint})"
