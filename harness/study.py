"""Runs a study: its missing cells on one worker process a core, then tables and pictures."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fragments.errors import DilocoError
from harness.study_process import CACHE, Worker
from harness.study_tables import NoCellsError, Tables, refuse_another_study, write_tables
from harness.study_worker import Answer, Hello
from simulation.study.matrix import PlannedRow, Recipe, Study, plan
from simulation.study.store import Cell, DamagedCellError, Store


@dataclass(frozen=True, slots=True)
class Job:
    """A recipe to make, and all rows that it is a cell of."""

    rows: tuple[str, ...]
    recipe: Recipe

    def __str__(self) -> str:
        return f"{', '.join(self.rows)} seed {self.recipe.seed}"


@dataclass(frozen=True, slots=True)
class Made:
    """What came of it. `tables`: None where no cell is there. `faults`: a sentence for each cell
    that could not be made, or stands there damaged. `is_stopped`: others are still to be made.
    """

    tables: Tables | None
    faults: tuple[str, ...]
    is_stopped: bool


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

    def run(self, stop: threading.Event) -> Made:
        """Make the missing cells until all are there or `stop` is set; then write the tables.

        A cell that cannot be made keeps no other from being made, and one that is damaged is left
        as it is.

        Raises:
            SettingsError: where cells cannot be kept, other results would be replaced, or another
                process makes these cells.
        """
        refuse_another_study(self._study, self._out)
        rows = plan(self._study)
        with self._store.held(self._study.name):
            jobs, damaged = missing_jobs(self._study, rows, self._store)
            total = sum(len(row.recipes) for row in rows)
            there = total - len(damaged) - sum(len(job.rows) for job in jobs)
            also = f", {len(damaged)} damaged" if damaged else ""
            self._say(f"{self._study.name}: {total} cells, {there} there already{also}")
            for line in damaged:
                self._say(line)
            if jobs:
                self._make(jobs, stop)
            try:
                tables = write_tables(self._study, self._out)
            except NoCellsError:
                tables = None
        return Made(tables, (*damaged, *self._refused), is_stopped=self._done < len(jobs))

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
                    self._note_refused(job, str(error), total)
            else:
                try:
                    self._finish(job, answer, worker.hello, total)
                except OSError as error:
                    self._note_refused(job, f"it cannot be kept: {error}", total)

    def _hire(self, stop: threading.Event) -> Worker:
        worker = Worker(self._cache)
        with self._lock:
            self._crew.append(worker)
        if stop.is_set():
            worker.end()
        return worker

    def _finish(self, job: Job, answer: Answer, hello: Hello, total: int) -> None:
        if answer.result is None:
            self._note_refused(job, answer.refusal, total)
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
        loss = f"{answer.result.loss:.4f} {answer.result.loss_unit}"
        self._count(f"{job}: {loss}, {answer.wall_s:.0f} s", total)

    def _note_refused(self, job: Job, reason: str, total: int) -> None:
        line = f"{job} could not be made: {' '.join(reason.split())}"
        with self._lock:
            self._refused.append(line)
        self._count(line, total)

    def _count(self, line: str, total: int) -> None:
        with self._lock:
            self._done += 1
            elapsed_s = time.monotonic() - self._began_s
            left_min = elapsed_s / self._done * (total - self._done) / 60
            self._say(f"[{self._done}/{total}] {line}; about {left_min:.0f} min left")


def missing_jobs(
    study: Study, rows: Sequence[PlannedRow], store: Store
) -> tuple[list[Job], list[str]]:
    """What is not there, or of another recipe; the first seed of every row comes first. Beside it a
    sentence for each cell that is damaged: those are nobody's to replace.

    A cell that another study has made from the same recipe is taken over, and is not missing.
    """
    missing: dict[str, Job] = {}
    damaged: list[str] = []
    elsewhere = store.by_recipe()
    for place in range(max(len(row.recipes) for row in rows)):
        for row in rows:
            if place >= len(row.recipes):
                continue
            recipe = row.recipes[place]
            try:
                is_there = store.finished(study.name, row.name, recipe) is not None
            except DamagedCellError as error:
                damaged.append(str(error))
                continue
            if is_there:
                continue
            twin = elsewhere.get(recipe.digest)
            if twin is not None:
                store.write(twin.model_copy(update={"study": study.name, "row": row.name}))
                continue
            job = missing.get(recipe.digest)
            names = job.rows if job is not None else ()
            missing[recipe.digest] = Job((*names, row.name), recipe)
    return list(missing.values()), damaged
