"""Runs a study: its missing cells on one worker process a core, then tables and pictures."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fragments.errors import DilocoError, SettingsError
from harness.environment import child_environment, module
from harness.study_worker import Answer, Hello
from harness.warm import use_cache
from simulation.study.matrix import PlannedRow, Recipe, Study, plan
from simulation.study.plot import draw_bits, draw_curves, draw_gaps
from simulation.study.store import Cell, Store
from simulation.study.table import Headline, markdown, summarise

CACHE = Path("runs/study")
"""Warm checkpoints and compiled steps; everything in it can be made again."""


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
        if code in (-signal.SIGKILL, -signal.SIGABRT):
            return f" (killed by signal {-code}: mostly for want of memory)"
        return f" (killed by signal {-code})" if code < 0 else f" (exit code {code})"


@dataclass(frozen=True, slots=True)
class Job:
    """A recipe to make, and all rows that it is a cell of."""

    rows: tuple[str, ...]
    recipe: Recipe

    def __str__(self) -> str:
        return f"{', '.join(self.rows)} seed {self.recipe.seed}"


class StudyRun:
    """Makes what is missing of a study.

    Args:
        study: what to make.
        out: where cells, tables and pictures go.
        command: what the person typed, for the record.
        say: takes lines for a person; called from several threads.
        workers: processes at once; None for one a core.
        cache: see CACHE.
    """

    def __init__(
        self,
        study: Study,
        out: Path,
        command: str,
        say: Callable[[str], None],
        workers: int | None = None,
        cache: Path = CACHE,
    ) -> None:
        self._study = study
        self._out = out
        self._store = Store(out / "cells")
        self._command = command
        self._say = say
        self._workers = workers or os.cpu_count() or 1
        self._cache = cache
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._crew: list[Worker] = []
        self._done = 0
        self._refused: list[str] = []

    def run(self, stop: threading.Event) -> Headline:
        """Make the missing cells until all are there or `stop` is set; then write the tables.

        A cell that cannot be made keeps no other from being made. Raises DilocoError, after all
        others and the tables, that names those cells and says why.
        """
        require_own(self._study, self._out)
        with self._store.held(self._study.name):
            return self._run(stop)

    def _run(self, stop: threading.Event) -> Headline:
        rows = plan(self._study)
        jobs = missing_jobs(self._study, rows, self._store)
        total = sum(len(row.recipes) for row in rows)
        missing = sum(len(job.rows) for job in jobs)
        self._say(f"{self._study.name}: {total} cells, {total - missing} there already")
        if jobs:
            self._make(jobs, stop)
        refused = "cells that could not be made: " + "; ".join(self._refused)
        try:
            headline, _ = write_tables(self._study, self._out)
        except SettingsError as error:
            if self._refused:
                raise DilocoError(refused) from error
            if stop.is_set():
                return summarise(self._study, rows, {})
            raise
        if self._refused:
            raise DilocoError(refused)
        return headline

    def _make(self, jobs: Sequence[Job], stop: threading.Event) -> None:
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        self._began_s = time.monotonic()
        self._crew = [Worker(self._cache) for _ in range(min(self._workers, len(jobs)))]
        threads = [
            threading.Thread(target=self._work, args=(worker, waiting, len(jobs), stop))
            for worker in self._crew
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not stop.wait(0.2):
            pass
        with self._lock:
            hired = tuple(self._crew)
        for worker in hired:
            worker.end()
        for thread in threads:
            thread.join()
        for worker in self._crew:
            worker.end()
            worker.close()

    def _work(
        self,
        worker: Worker,
        waiting: queue.SimpleQueue[Job],
        total: int,
        stop: threading.Event,
    ) -> None:
        while not stop.is_set():
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                # The job before may have ended its process; one more is hired a job at the most.
                worker = worker if worker.is_running else self._hire(stop)
                answer = worker.run(job.recipe)
            except DilocoError as error:
                if not stop.is_set():
                    self._note_refused(job, str(error))
            else:
                try:
                    self._finish(job, answer, worker.hello, total)
                except OSError as error:
                    self._note_refused(job, f"it cannot be kept: {error}")

    def _hire(self, stop: threading.Event) -> Worker:
        worker = Worker(self._cache)
        with self._lock:
            self._crew.append(worker)
        if stop.is_set():
            worker.end()
        return worker

    def _finish(self, job: Job, answer: Answer, hello: Hello, total: int) -> None:
        if answer.result is None:
            self._note_refused(job, answer.refusal)
            return
        for row in job.rows:
            cell = Cell(
                study=self._study.name,
                row=row,
                seed=job.recipe.seed,
                recipe=job.recipe,
                recipe_digest=job.recipe.digest,
                completed=job.recipe.completed,
                result=answer.result,
                commit=hello.commit,
                command=self._command,
                isa=hello.isa,
                wall_s=answer.wall_s,
            )
            self._store.write(cell)
        with self._lock:
            self._done += 1
            elapsed_s = time.monotonic() - self._began_s
            left_min = elapsed_s / self._done * (total - self._done) / 60
            self._say(
                f"[{self._done}/{total}] {job}: "
                f"{answer.result.loss:.4f} {answer.result.loss_unit}, {answer.wall_s:.0f} s; "
                f"about {left_min:.0f} min left"
            )

    def _note_refused(self, job: Job, reason: str) -> None:
        with self._lock:
            self._refused.append(f"{job}: {reason}")
            self._say(f"{job} could not be made: {reason}")


def missing_jobs(study: Study, rows: Sequence[PlannedRow], store: Store) -> list[Job]:
    """What is not there, or of another recipe; the first seed of every row comes first.

    A cell that another study has made from the same recipe is taken over, and is not missing.
    """
    missing: dict[str, Job] = {}
    elsewhere = store.by_recipe()
    for place in range(max(len(row.recipes) for row in rows)):
        for row in rows:
            if place < len(row.recipes):
                recipe = row.recipes[place]
                if store.finished(study.name, row.name, recipe) is not None:
                    continue
                twin = elsewhere.get(recipe.digest)
                if twin is not None:
                    store.write(twin.model_copy(update={"study": study.name, "row": row.name}))
                    continue
                job = missing.get(recipe.digest)
                names = job.rows if job is not None else ()
                missing[recipe.digest] = Job((*names, row.name), recipe)
    return list(missing.values())


def require_own(study: Study, out: Path) -> None:
    """Raises SettingsError where the tables there are another study's of that name."""
    path = out / f"{study.name}.json"
    try:
        title = json.loads(path.read_text(encoding="utf-8")).get("title")
    except (OSError, ValueError, AttributeError):
        return
    if title != study.title:
        raise SettingsError(
            f"{path} is the table of another study of that name ({title!r}): give this one"
            f" ({study.title!r}) a name of its own, or another --out"
        )


def write_tables(study: Study, out: Path) -> tuple[Headline, list[str]]:
    """Writes `<name>.json`, `<name>.md` and two pictures from the finished cells; with them, a
    sentence for each cell that is not what was written, and is left out.

    Raises SettingsError, and writes nothing, where no cell is finished, or where the tables there
    are another study's.
    """
    require_own(study, out)
    rows, store = plan(study), Store(out / "cells")
    cells: dict[str, dict[int, Cell]] = {}
    damaged: list[str] = []
    for row in rows:
        for recipe in row.recipes:
            try:
                cell = store.finished(study.name, row.name, recipe)
            except SettingsError as error:
                damaged.append(str(error))
                continue
            if cell is not None:
                cells.setdefault(row.name, {})[recipe.seed] = cell
    if not cells:
        found = "; ".join(damaged) or f"there is none under {out / 'cells' / study.name}"
        raise SettingsError(f"no cell of study {study.name} is finished: {found}")
    headline = summarise(study, rows, cells)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / f"{study.name}.json", headline.model_dump_json(indent=1) + "\n")
    _write(out / f"{study.name}.md", markdown(headline))
    draw_gaps(headline, out / f"{study.name}-gaps.png")
    draw_curves(headline, cells, out / f"{study.name}-curves.png")
    if study.against_bits:
        draw_bits(headline, out / f"{study.name}-bits.png")
    return headline, damaged


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
