"""A study as its TOML file says it: rows, seeds, and what every cell is made from. No jax."""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fragments.errors import SettingsError
from fragments.overlay import overlay
from fragments.runspec import RunSpec
from simulation.study.sense import (
    check_finite,
    check_keys,
    check_seeds,
    check_varied,
    explain,
)
from simulation.world import World

Start = Literal["scratch", "warm"]
Kind = Literal["rounds", "pushes", "data_parallel", "alone"]
NAME = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,79}$"
"""Of studies and rows; they are names of files too."""

Name = Annotated[str, Field(pattern=NAME)]
Seed = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Reference = Literal["dp", "alone", "equal", "sync"]
"""What a row may be held to: data-parallel, one learner alone, the same with equal learners, and
synchronous DiLoCo.
"""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Warm(_Model):
    """The checkpoint that warm rows begin from: data-parallel training, once per seed.

    `tokens`: trained in it. `learners`: whose batches make up its steps. `spec`: run settings
    over those of the study.
    """

    tokens: Annotated[int, Field(gt=0)]
    learners: Annotated[int, Field(gt=0)] = 4
    spec: dict[str, Any] = Field(default_factory=dict)


class Row(_Model):
    """One row of the matrix.

    `kind`: rounds (the scheduler), pushes (each applied alone, when `pushed` says), data_parallel,
    or alone (learner 0 on its share of the tokens). `late_against`: what late contributions are
    taken against; "base" is the production rule. `spec` and `world` are laid over those of the
    study. `vary` makes one row of each combination of values, by dotted key ("spec.quorum").
    `starts` and `seeds` replace the study's. `versus` names the rows to be held to, over the
    study's; they are those of the same start.
    """

    name: Name
    about: str = ""
    kind: Kind = "rounds"
    pushed: Literal["learner", "server"] = "learner"
    late_against: Literal["base", "current"] = "base"
    spec: dict[str, Any] = Field(default_factory=dict)
    world: dict[str, Any] = Field(default_factory=dict)
    vary: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    starts: tuple[Start, ...] | None = None
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] | None = None
    versus: dict[Reference, Name] = Field(default_factory=dict)


class Study(_Model):
    """The whole file. `against_bits`: also draw gaps to "equal" against the bits on the wire."""

    name: Name
    title: str
    about: str = ""
    against_bits: bool = False
    data: str | None = None
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    starts: Annotated[tuple[Start, ...], Field(min_length=1)] = ("scratch",)
    warm: Warm | None = None
    spec: dict[str, Any] = Field(default_factory=dict)
    world: dict[str, Any] = Field(default_factory=dict)
    versus: dict[Reference, Name] = Field(default_factory=dict)
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]


class Recipe(_Model):
    """Everything that a cell is made from. Equal recipes are the same run.

    `spec` and `world` hold what was given only: a new setting with a default that changes nothing
    leaves the digest as it is. What a changed default makes of it, `completed` says.
    """

    kind: Kind
    pushed: Literal["learner", "server"] = "learner"
    late_against: Literal["base", "current"] = "base"
    seed: int
    data: str | None = None
    spec: dict[str, Any]
    world: dict[str, Any]
    warm: Warm | None = None

    @property
    def digest(self) -> str:
        """Sha256 (64 hex digits) of the canonical text."""
        given = self.model_dump(mode="json", exclude_defaults=True)
        text = json.dumps(given, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def run_spec(self) -> RunSpec:
        """The settings of the run, its seed put in."""
        return RunSpec.model_validate({**self.spec, "seed": self.seed})

    @property
    def run_world(self) -> World:
        """The world of the run."""
        return World.model_validate(self.world)

    @property
    def completed(self) -> dict[str, Any]:
        """All settings of the run, its world and its checkpoint, with what this code has for those
        that were not given. The program's own settings are as given.
        """
        warm = (
            {}
            if self.warm is None
            else RunSpec.model_validate(self.warm.spec).model_dump(mode="json")
        )
        return {
            "spec": self.run_spec.model_dump(mode="json"),
            "world": self.run_world.model_dump(mode="json"),
            "warm": warm,
        }


class PlannedRow(_Model):
    """A row after its variations and starts are taken apart; `name` is unique in the study."""

    name: Name
    about: str
    start: Start
    versus: dict[Reference, Name]
    recipes: tuple[Recipe, ...]


def load_study(path: Path) -> Study:
    """The study in a TOML file.

    With `base`, the name of another study beside it, the file's tables are laid over that one's and
    its rows follow that one's; a row named as one of those replaces it.

    Raises SettingsError where it cannot be read or makes no sense.
    """
    document: dict[str, Any] = {}
    try:
        document = _document(path)
        study = Study.model_validate(document)
        plan(study)
    except ValidationError as error:
        raise SettingsError(f"{path}: {explain(error, rows=document.get('rows'))}") from error
    except (AttributeError, TypeError, ValueError) as error:
        # A table where a value is wanted, or the other way round.
        raise SettingsError(f"{path}: {error}") from error
    return study


def _document(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the study {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not a TOML file: {error}") from error
    base = document.pop("base", None)
    if base is None:
        return document
    below = path.with_name(str(base))
    if below in (path, *above):
        raise SettingsError(f"{path}: its base {base} is built on it")
    inherited = _document(below, (path, *above))
    both = overlay(inherited, document)
    both["rows"] = _rows_over(inherited.get("rows", []), document.get("rows", []))
    return both


def _rows_over(below: Any, above: Any) -> Any:
    """Rows of the base that the study does not name itself, then its own."""
    if not isinstance(below, list) or not isinstance(above, list):
        return above
    own = {row.get("name") for row in above if isinstance(row, dict)}
    kept = [row for row in below if isinstance(row, dict) and row.get("name") not in own]
    return [*kept, *above]


def plan(study: Study) -> tuple[PlannedRow, ...]:
    """All rows with the recipe of each of their seeds, in the file's order.

    Raises SettingsError for a setting that no run takes, or a row named twice or missing.
    """
    check_seeds(study.name, study.seeds)
    rows = tuple(_planned(study))
    names = [row.name for row in rows]
    for row in rows:
        if names.count(row.name) > 1:
            raise SettingsError(f"study {study.name} has two rows named {row.name}")
        for reference, name in row.versus.items():
            if name not in names:
                raise SettingsError(
                    f"row {row.name} is to be held to {name} ({reference}), which is no row"
                )
    return rows


def _planned(study: Study) -> Iterator[PlannedRow]:
    for row in study.rows:
        for suffix, varied in _variations(row):
            for start in row.starts or study.starts:
                yield _plan_row(study, row, suffix, varied, start)


def _plan_row(
    study: Study, row: Row, suffix: str, varied: Mapping[str, Any], start: Start
) -> PlannedRow:
    name = row_name(row.name + suffix, start)
    _check_row(name, row)
    if start == "warm" and study.warm is None:
        raise SettingsError(f"row {name} begins warm, but the study has no [warm]")
    layers = {
        "spec": overlay(study.spec, overlay(row.spec, varied.get("spec", {}))),
        "world": overlay(study.world, overlay(row.world, varied.get("world", {}))),
    }
    warm = None
    if start == "warm" and study.warm is not None:
        spec = overlay(study.spec, study.warm.spec)
        warm = study.warm.model_copy(update={"spec": spec})
    recipes = tuple(
        Recipe(
            kind=row.kind,
            pushed=row.pushed,
            late_against=row.late_against,
            seed=seed,
            data=study.data,
            spec=layers["spec"],
            world=layers["world"],
            warm=warm,
        )
        for seed in (row.seeds or study.seeds)
    )
    for part, given in (*layers.items(), ("warm.spec", warm.spec if warm else {})):
        check_finite(f"row {name}: {part}", given)
        if part != "world" and "seed" in given:
            raise SettingsError(f"row {name}: {part}.seed is the study's: give seeds")
        check_keys(f"row {name}", part, World if part == "world" else RunSpec, given)
    versus = {key: row_name(other, start) for key, other in {**study.versus, **row.versus}.items()}
    return PlannedRow(name=name, about=row.about, start=start, versus=versus, recipes=recipes)


def _check_row(name: str, row: Row) -> None:
    """Raises SettingsError for a key that the row's kind does not take."""
    if row.seeds is not None:
        check_seeds(f"row {name}", row.seeds)
    for key, kind in (("pushed", "pushes"), ("late_against", "rounds")):
        if key in row.model_fields_set and row.kind != kind:
            raise SettingsError(f'row {name}: {key} is for kind = "{kind}", not "{row.kind}"')


def row_name(name: str, start: Start) -> str:
    """Rows from scratch carry it in their name; warm ones have the plain name."""
    return name if start == "warm" else f"{name}_scratch"


def _variations(row: Row) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name suffix and nested settings of each combination in `vary`; one empty one without it."""
    check_varied(f"row {row.name}", row.vary)
    keys = list(row.vary)
    for values in itertools.product(*(row.vary[key] for key in keys)):
        nested: dict[str, Any] = {}
        parts = []
        for key, value in zip(keys, values, strict=True):
            *parents, leaf = key.split(".")
            inside = nested
            for parent in parents:
                inside = inside.setdefault(parent, {})
            inside[leaf] = value
            # A table's own keys say what it is.
            parts.append(
                _as_name(value) if isinstance(value, dict) else f"{leaf}_{_as_name(value)}"
            )
        yield "".join(f"-{part}" for part in parts), nested


def _as_name(value: Any) -> str:
    if isinstance(value, Mapping):
        return "-".join(f"{key}_{_as_name(inner)}" for key, inner in value.items())
    text = value if isinstance(value, str) else json.dumps(value)
    return "".join(char if char.isalnum() or char in "._-" else "-" for char in text).strip("-")
