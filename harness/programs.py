"""From the name of a factory to the program that it builds. Importing this imports no jax."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fragments.errors import SettingsError
from fragments.runspec import RunSpec
from harness.nearest import did_you_mean
from learner.program import Program


def load_program(spec: RunSpec, data: str | None) -> Program:
    """The program of a run: `spec.program.factory(settings, data, seed)`.

    The working directory is searched after everything installed, so that a model of one's own
    need not be a package. `data` is a path or a glob, None for the program's default corpus.

    Raises:
        SettingsError: when the factory cannot be found, or refuses its settings.
        DataError: from the factory, when the data cannot be used.
    """
    factory = _find(spec.program.factory)
    try:
        program: Program = factory(dict(spec.program.settings), data, spec.seed)
    except ValidationError as error:
        known = _settings_of(error.title, spec.program.factory)
        raise SettingsError(_explain(error, spec.program.factory, known)) from error
    return program


def _find(factory: str) -> Callable[[dict[str, Any], str | None, int], Program]:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    module_name, _, function_name = factory.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that the factory's own module misses is its author's business, with a traceback.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise SettingsError(
            f"program.factory {factory}: there is no module {error.name}; it must be installed or"
            " lie in the working directory"
        ) from error
    found = getattr(module, function_name, None)
    if not callable(found):
        raise SettingsError(f"program.factory {factory}: {module_name} has no {function_name}()")
    build: Callable[[dict[str, Any], str | None, int], Program] = found
    return build


def _settings_of(title: str, factory: str) -> list[str]:
    """Field names of the settings model that refused, where the factory's module shows it."""
    model = getattr(sys.modules[factory.partition(":")[0]], title, None)
    if isinstance(model, type) and issubclass(model, BaseModel):
        return list(model.model_fields)
    return []


def _explain(error: ValidationError, factory: str, known: list[str]) -> str:
    lines = []
    for detail in error.errors(include_url=False):
        name = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            message = "no such setting" + did_you_mean(name, known)
        lines.append(f"program.settings {name}: {message}" if name else message)
    return f"{factory} refuses its settings: " + "; ".join(lines)
