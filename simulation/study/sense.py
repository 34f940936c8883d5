"""What a study's file may not say although its types are right, and how a refusal is put."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fragments.errors import SettingsError


def check_seeds(where: str, seeds: tuple[int, ...]) -> None:
    """Raises SettingsError for a seed that is there twice."""
    if len(set(seeds)) < len(seeds):
        raise SettingsError(f"{where}: seeds: a seed is there twice: {list(seeds)}")


def check_finite(where: str, given: Any) -> None:
    """Raises SettingsError, with the key, for a number that is not finite."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            check_finite(f"{where}.{key}", value)
    elif isinstance(given, list | tuple):
        for value in given:
            check_finite(where, value)
    elif isinstance(given, float) and not math.isfinite(given):
        raise SettingsError(f"{where}: {given} is no number that a run could take")


def check_varied(where: str, vary: Mapping[str, Sequence[Any]]) -> None:
    """Raises SettingsError, with the key, where one varied key would replace another, or what it
    replaces is no table.
    """
    for key, values in vary.items():
        if key.split(".")[0] not in ("spec", "world"):
            raise SettingsError(f"{where}: vary: {key} is not under spec or world")
        for other in vary:
            if key.startswith(other + "."):
                raise SettingsError(f"{where}: vary: {key} is inside {other}, which varies too")
        wrong = [value for value in values if not isinstance(value, Mapping)]
        if "." not in key and wrong:
            raise SettingsError(f"{where}: vary: {key} takes tables, not {wrong[0]}")


def check_keys(where: str, part: str, model: type[BaseModel], given: Mapping[str, Any]) -> None:
    """Raises SettingsError, with the keys, where `given` is no `model`. `part`: what it is called
    in the file.
    """
    try:
        model.model_validate(given)
    except ValidationError as error:
        raise SettingsError(f"{where}: {explain(error, under=part)}") from error


def explain(error: ValidationError, *, under: str = "", rows: Any = None) -> str:
    """The refusal as a sentence. `under`: the key of what was read; `rows`: those of a whole
    document, which are called by their names.
    """
    lines = []
    details = error.errors(include_url=False)
    for detail in details:
        if any(_follows(detail, other) for other in details):
            continue
        where = _place(([under] if under else []) + list(detail["loc"]), rows)
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            message = "no such setting"
        lines.append(f"{where}: {message}" if where else message)
    return "; ".join(lines)


def _follows(detail: ErrorDetails, other: ErrorDetails) -> bool:
    """Whether a list is short only since what is in it is refused, which is told."""
    depth = len(detail["loc"])
    is_inside = len(other["loc"]) > depth and other["loc"][:depth] == detail["loc"]
    return detail["type"] == "too_short" and is_inside


def _place(keys: Sequence[int | str], rows: Any) -> str:
    match keys:
        case ("rows", int(index), key, *rest) if isinstance(rows, list):
            row = rows[index]
            if isinstance(row, Mapping) and "name" in row:
                return f"row {row['name']}: " + ".".join(str(part) for part in (key, *rest))
    return ".".join(str(part) for part in keys)
