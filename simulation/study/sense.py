"""What a study's file may not say although its types are right, and how a refusal is put."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

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
    for detail in error.errors(include_url=False):
        where = _place(([under] if under else []) + list(detail["loc"]), rows)
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            message = "no such setting"
        lines.append(f"{where}: {message}" if where else message)
    return "; ".join(lines)


def _place(keys: Sequence[int | str], rows: Any) -> str:
    match keys:
        case ("rows", int(index), key, *rest) if isinstance(rows, list):
            row = rows[index]
            if isinstance(row, Mapping) and "name" in row:
                return f"row {row['name']}: " + ".".join(str(part) for part in (key, *rest))
    return ".".join(str(part) for part in keys)
