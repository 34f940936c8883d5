"""From the name of a factory to the program that it builds. Importing this imports no jax."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ValidationError

from fragments.errors import DilocoError, SettingsError
from fragments.runspec import RunSpec
from harness.nearest import did_you_mean
from learner.program import Program

EXPECTED = "build(settings: dict[str, Any], data: str | None, seed: int) -> Program"
"""What a factory must look like; `learner.program` says the rest."""


def load_program(spec: RunSpec, data: str | None) -> Program:
    """The program of a run: `spec.program.factory(settings, data, seed)`.

    The working directory is searched after everything installed, so that a model of one's own
    need not be a package. `data` is a path or a glob, None for the program's default corpus.

    Raises:
        SettingsError: when the factory cannot be found or called, refuses its settings, raises
            anything else, or returns what is no program; the error that it raised is the cause.
        DataError: from the factory, when the data cannot be used.
    """
    name = spec.program.factory
    module = _import(name)
    factory = _find(name, module)
    try:
        program = factory(dict(spec.program.settings), data, spec.seed)
    except ValidationError as error:
        known = _settings_of(error.title, name)
        raise SettingsError(_explain(error, name, known)) from error
    except DilocoError:
        raise
    except Exception as error:  # a stranger's code may raise anything: one sentence
        raise SettingsError(f"program.factory {name} raised {_told(error, module)}") from error
    return _checked(name, program)


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    module_name = name.partition(":")[0]
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # importing runs a stranger's code too
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module_name + ".").startswith(missing + "."):
            raise SettingsError(
                f"program.factory {name}: there is no module {missing}; it must be installed or"
                " lie in the working directory"
            ) from error
        raise SettingsError(
            f"program.factory {name}: importing {module_name} raised {_told(error, None)}"
        ) from error


def _find(name: str, module: ModuleType) -> Callable[[dict[str, Any], str | None, int], Any]:
    module_name, _, function_name = name.partition(":")
    found = getattr(module, function_name, None)
    if not callable(found):
        others = [each for each, value in vars(module).items() if callable(value)]
        raise SettingsError(
            f"program.factory {name}: {module_name} has no {function_name}()"
            f"{did_you_mean(function_name, others)}; it must be {EXPECTED}"
        )
    factory: Callable[[dict[str, Any], str | None, int], Any] = found
    try:
        signature = inspect.signature(factory)
    except ValueError:  # compiled code may not tell; the call will
        return factory
    try:
        signature.bind({}, None, 0)
    except TypeError as error:
        raise SettingsError(
            f"program.factory {name} is {function_name}{signature}; it must be {EXPECTED}"
        ) from error
    return factory


def _checked(name: str, program: Any) -> Program:
    """`program`, if it has all that a `Program` has."""
    lacks = [
        f"{part}()" if callable(what) else part
        for part, what in vars(Program).items()
        if not (part.startswith("_") or _has(program, part, method=callable(what)))
    ]
    if lacks:
        what = "None" if program is None else f"a {type(program).__name__}"
        raise SettingsError(
            f"program.factory {name} returned {what}, which is no program: it lacks"
            f" {', '.join(lacks)} (learner/program.py says what each is)"
        )
    built: Program = program
    return built


def _has(program: Any, part: str, *, method: bool) -> bool:
    return hasattr(program, part) and (not method or callable(getattr(program, part)))


def _told(error: Exception, module: ModuleType | None) -> str:
    """The error with the line of the module, or else of whatever, that it came through last."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == getattr(module, "__file__", None)]
    told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frame = (own or frames)[-1]
    return told if isinstance(error, SyntaxError) else f"{told} ({frame.filename}:{frame.lineno})"


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
