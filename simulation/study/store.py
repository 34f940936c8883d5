"""Finished cells on disk: one JSON file each, whole or not there."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fragments.errors import SettingsError
from fragments.sealed import SEAL, seal, unseal
from simulation.result import RunResult
from simulation.study.matrix import NAME, Recipe

PREFERRED = "headline"
"""The study whose row is meant where several have another of that name."""


class Cell(BaseModel):
    """A finished cell: what it was made from, what came out, and by what it was made.

    `commit` is that of the code, with "+" where the working tree differed from it. `isa` is the
    processor's instruction set as far as it shapes the bits, and who computes what (see
    `harness.study_worker.ARITHMETIC`): digests are equal with the same one.
    `completed` is `Recipe.completed` when it was made; empty in cells that are older than it.
    """

    study: str
    row: str
    seed: int
    recipe: Recipe
    recipe_digest: str
    completed: dict[str, Any] = Field(default_factory=dict)
    result: RunResult
    commit: str
    command: str
    isa: str
    wall_s: float

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    @property
    def is_current(self) -> bool:
        """Does its recipe still mean the same run? Not where a default has changed since; a setting
        that is new since then had no other value.
        """
        try:
            return _holds(self.completed, self.recipe.completed)
        except ValidationError:
            return False


def _holds(then: Any, now: Any) -> bool:
    """Whether all that `then` says stands in `now` as well."""
    if isinstance(then, dict) and isinstance(now, dict):
        return all(key in now and _holds(value, now[key]) for key, value in then.items())
    return bool(then == now)


class DamagedCellError(SettingsError):
    """A file that should be a finished cell and is not, or is another's; the message says what to
    do.
    """


class Store:
    """The cells under one directory, `<study>/<row>-<seed>.json`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self, study: str) -> None:
        """Raises SettingsError where the cells of a study could not be written."""
        try:
            (self._directory / study).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            place = self._directory / study
            raise SettingsError(f"cells cannot be kept in {place}: {error.strerror}") from error

    @contextmanager
    def held(self, study: str) -> Iterator[None]:
        """While cells of a study are made. Raises SettingsError where that is done already."""
        self.prepare(study)
        with (self._directory / f".{study}.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SettingsError(
                    f"another `diloco study run` makes cells in {self._directory / study}: wait for"
                    " it, or give another --out"
                ) from None
            yield

    def path(self, study: str, row: str, seed: int) -> Path:
        """Where a cell is, or would be."""
        return self._directory / study / f"{row}-{seed}.json"

    def read(self, study: str, row: str, seed: int) -> Cell | None:
        """The finished cell, None where there is none. Raises DamagedCellError for one that is not
        what was written there.
        """
        path = self.path(study, row, seed)
        if not path.exists():
            return None
        remedy = "remove it to have it made again"
        try:
            cell = _parsed(path.read_bytes())
        except (ValueError, OSError) as error:
            told = f"{path} is no finished cell: {error}; {remedy}"
            raise DamagedCellError(told) from error
        if (cell.study, cell.row, cell.seed, cell.recipe.seed) != (study, row, seed, seed):
            found = f"{cell.study}/{cell.row} seed {cell.seed}"
            raise DamagedCellError(f"{path} is the cell of {found}; {remedy}")
        if cell.recipe.digest != cell.recipe_digest:
            raise DamagedCellError(f"{path} has another recipe than it says; {remedy}")
        return cell

    def finished(self, study: str, row: str, recipe: Recipe) -> Cell | None:
        """The finished cell of this very recipe and its present meaning; no other counts."""
        cell = self.read(study, row, recipe.seed)
        if cell is None or cell.recipe_digest != recipe.digest or not cell.is_current:
            return None
        return cell

    def by_recipe(self) -> dict[str, Cell]:
        """Finished cells of all studies by the digest of their recipe: one run serves them all."""
        found: dict[str, Cell] = {}
        for path in sorted(self._directory.glob("*/*.json")):
            row, _, seed = path.stem.rpartition("-")
            try:
                cell = self.read(path.parent.name, row, int(seed)) if seed.isdigit() else None
            except SettingsError:  # It is told where it is wanted; here another may serve.
                continue
            if cell is not None and cell.is_current:
                found.setdefault(cell.recipe_digest, cell)
        return found

    def write(self, cell: Cell) -> Path:
        """Put a cell in place, whole."""
        path = self.path(cell.study, cell.row, cell.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(seal(json.loads(cell.model_dump_json())) + b"\n")
        part.replace(path)
        return path

    def find(self, row: str, seed: int, study: str | None = None) -> Cell:
        """The cell of that row and seed: of `study`, or else of whichever study has it.

        Studies have rows of one name that are other runs, as their lengths differ: then that of
        the study `PREFERRED`. Raises SettingsError when there is none, or nothing says which.
        """
        if not re.fullmatch(NAME, row) or seed < 0:
            raise SettingsError(
                f"{row} with seed {seed} names no cell: a row is called as in the table, and seeds"
                " begin at 0"
            )
        studies = sorted(p.name for p in self._directory.glob("*") if p.is_dir())
        if study is not None:
            if study not in studies:
                known = ", ".join(studies) or "none"
                raise SettingsError(f"no study {study} is under {self._directory}, but: {known}")
            studies = [study]
        if PREFERRED in studies and (cell := self.read(PREFERRED, row, seed)) is not None:
            return cell
        found = {name: cell for name in studies if (cell := self.read(name, row, seed)) is not None}
        if not found:
            where = self._directory if study is None else self._directory / study
            raise SettingsError(
                f"there is no finished cell of row {row} and seed {seed} under {where}: run it in a"
                " checkout, or name the directory of the results with --out"
            )
        if len({cell.recipe_digest for cell in found.values()}) > 1:
            names = ", ".join(found)
            raise SettingsError(
                f"row {row} is in several studies ({names}): say which, --from-study"
            )
        return next(iter(found.values()))


def _parsed(data: bytes) -> Cell:
    """Raises ValueError, with a sentence, where that is not what was written."""
    try:
        document = unseal(data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError("it is no JSON") from error
    except ValueError as error:
        if SEAL.encode() not in data:
            raise ValueError(f"it has no checksum ({SEAL})") from error
        raise
    try:
        # By its text: what JSON has no numbers for is written in words.
        return Cell.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise ValueError(f"{error.error_count()} faults") from error
