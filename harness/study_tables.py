"""The tables and pictures of a study, from those of its cells that are finished and whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fragments.errors import SettingsError
from simulation.study.matrix import PlannedRow, Study, plan
from simulation.study.plot import draw_bits, draw_curves, draw_gaps
from simulation.study.store import Cell, DamagedCellError, Store
from simulation.study.table import Headline, markdown, summarise


class NoCellsError(SettingsError):
    """A study of which no cell is there."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What was written. `damaged`: a sentence for each cell that was left out for not being whole;
    it counts as one that is not made.
    """

    headline: Headline
    damaged: tuple[str, ...]


def write_tables(study: Study, out: Path) -> Tables:
    """Writes `<name>.json`, `<name>.md` and the pictures from the finished cells.

    Nothing is written where it raises: NoCellsError when there is no such cell, SettingsError when
    what stands there is another study's.
    """
    refuse_another_study(study, out)
    rows = plan(study)
    cells, damaged = _read(study, rows, Store(out / "cells"))
    if not cells:
        told = "; ".join(damaged)
        raise NoCellsError(
            f"no finished cell of the study {study.name} is under {out / 'cells'}: make them with"
            " `diloco study run`, or name their directory with --out"
            + (f" (damaged: {told})" if told else "")
        )
    headline = summarise(study, rows, cells)
    _write(out / f"{study.name}.json", headline.model_dump_json(indent=1) + "\n")
    _write(out / f"{study.name}.md", markdown(headline))
    draw_gaps(headline, out / f"{study.name}-gaps.png")
    draw_curves(headline, cells, out / f"{study.name}-curves.png")
    if study.against_bits:
        draw_bits(headline, out / f"{study.name}-bits.png")
    return Tables(headline, damaged)


def refuse_another_study(study: Study, out: Path) -> None:
    """Raises SettingsError where the results of this study would replace others, or cannot be
    written.
    """
    if out.exists() and not out.is_dir():
        raise SettingsError(f"{out} is no directory: give --out one for cells, tables and pictures")
    path = out / f"{study.name}.json"
    if not path.exists():
        return
    try:
        title = json.loads(path.read_bytes())["title"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SettingsError(
            f"{path} is no table of a study: give this one another name, or another --out"
        ) from error
    if title != study.title:
        raise SettingsError(
            f"{path} is the table of another study of that name ({title!r}): give this one a name"
            f" of its own, or another --out (or remove {path}, where only the title is new)"
        )


def _read(
    study: Study, rows: Sequence[PlannedRow], store: Store
) -> tuple[dict[str, dict[int, Cell]], tuple[str, ...]]:
    cells: dict[str, dict[int, Cell]] = {}
    damaged = []
    for row in rows:
        for recipe in row.recipes:
            try:
                cell = store.finished(study.name, row.name, recipe)
            except DamagedCellError as error:
                damaged.append(str(error))
            else:
                if cell is not None:
                    cells.setdefault(row.name, {})[recipe.seed] = cell
    return cells, tuple(damaged)


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
