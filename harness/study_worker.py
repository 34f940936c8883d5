"""One process that makes cells of a study: `python -m harness.study_worker CACHE`.

It reads a recipe a line from stdin, and writes one answer a line to stdout: first a hello with the
code it runs, then for each recipe its result or the sentence why there is none. It lives for many
cells, so that corpus and compiled steps are made once; it ends at once when stdin does, which a
parent's death by kill -9 brings about too.
"""

from __future__ import annotations

import hashlib
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, ConfigDict

from fragments.errors import DilocoError
from fragments.runspec import ProgramSettings, RunSpec
from learner.program import Program
from simulation.result import RunResult
from simulation.study.matrix import Recipe

_CODE = ("fragments", "outer_server", "learner", "simulation", "harness")
_SHAPING = ("avx2", "avx512f", "amx_tile")


class Hello(BaseModel):
    """What a worker is made of; see `simulation.study.store.Cell`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    commit: str
    isa: str


class Answer(BaseModel):
    """The result of a recipe, or the sentence why there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    result: RunResult | None = None
    refusal: str = ""
    wall_s: float = 0.0


def code_commit() -> str:
    """Commit of the code that this process runs, "+" after it where files differ; or "unknown"."""
    root = Path(__file__).parent.parent
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", *_CODE)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


ARITHMETIC = "loops-2"
"""Changed where the same recipe has other bits from here on: by now the outer step and the
quantizer are loops of our own."""


def instruction_set() -> str:
    """The machine, `ARITHMETIC`, and what of its instruction set shapes compiled code's bits."""
    names = [platform.machine(), ARITHMETIC]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        flags = next((line.split() for line in lines if line.startswith("flags")), [])
        names += [name for name in _SHAPING if name in flags]
    return " ".join(names)


@lru_cache(maxsize=1)
def made_by() -> str:
    """Whatever shapes the bits that this process computes: code, jax, instruction set."""
    root, code = Path(__file__).parent.parent, hashlib.sha256()
    for room in _CODE:
        for path in sorted((root / room).rglob("*.py")):
            code.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return f"{code.hexdigest()} jax {version('jax')} {version('jaxlib')} {instruction_set()}"


def answer(recipe: Recipe, cache: Path) -> Answer:
    """Runs one recipe."""
    from simulation.study.cell import run_recipe

    began_s = time.monotonic()
    try:
        result = run_recipe(recipe, _load_program, cache, made_by())
    except DilocoError as error:
        return Answer(refusal=str(error), wall_s=round(time.monotonic() - began_s, 2))
    except (MemoryError, RuntimeError) as error:  # jax's own for it is a RuntimeError
        if not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
            raise
        refusal = "out of memory: fewer --workers or a smaller model need less"
        return Answer(refusal=refusal, wall_s=round(time.monotonic() - began_s, 2))
    return Answer(result=result, wall_s=round(time.monotonic() - began_s, 2))


def _load_program(spec: RunSpec, data: str | None) -> Program:
    """The program of a run, the same object for the same one: it holds compiled steps."""
    return _cached_program(spec.program.model_dump_json(), data, spec.seed)


@lru_cache(maxsize=4)
def _cached_program(program_json: str, data: str | None, seed: int) -> Program:
    from harness.programs import load_program

    program = ProgramSettings.model_validate_json(program_json)
    return load_program(RunSpec(program=program, seed=seed), data)


def _serve(cache: Path, lines: TextIO, answers: TextIO) -> None:
    recipes: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines, recipes), daemon=True).start()
    hello = Hello(commit=code_commit(), isa=instruction_set())
    print(hello.model_dump_json(), file=answers, flush=True)
    while True:
        recipe = Recipe.model_validate_json(recipes.get())
        print(answer(recipe, cache).model_dump_json(), file=answers, flush=True)


def _listen(lines: TextIO, recipes: queue.SimpleQueue[str]) -> None:
    """Ends the process with its stdin: nobody is there for the answer that it is at."""
    for line in lines:
        recipes.put(line)
    os._exit(0)


if __name__ == "__main__":
    # Only answers go to stdout: what a library prints there must not be taken for one.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        _serve(Path(sys.argv[1]), sys.stdin, out)
