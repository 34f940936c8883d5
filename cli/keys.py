"""The settings of a verb as a flat list of keys: what flags, environment and file are checked by.

One pydantic model is the only place where a setting is written down. A key is one leaf of it and
knows its three spellings: `outer.learning_rate` in a file, `--outer.learning-rate` as a flag and
`DILOCO_OUTER__LEARNING_RATE` in the environment.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Positional:
    """Marker in a field's annotation: the flag's value is given by place, not by name."""


class VerbSettings(BaseModel):
    """What every verb takes. The models of the verbs derive from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_keys: ClassVar[frozenset[str]] = frozenset()
    """Dotted keys of the model that the program sets and a person cannot."""

    log_format: Literal["console", "json"] = Field(
        default="console", description="how logs are written"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the least severe log line that is written, to stderr"
    )


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: a leaf of a settings model.

    `kind` is how its text is read: a "switch" is on or off, a "list" takes several values, a
    "table" takes name=value pairs, and a "value" is one text that the model converts.
    """

    path: tuple[str, ...]
    field: FieldInfo
    kind: Literal["value", "switch", "list", "table"]
    positional: bool

    @property
    def dotted(self) -> str:
        """As in a file or an error: `outer.learning_rate`."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """As on the command line: `--outer.learning-rate`."""
        return "--" + self.dotted.replace("_", "-")

    @property
    def variable(self) -> str:
        """As in the environment, without the prefix: `OUTER__LEARNING_RATE`."""
        return "__".join(self.path).upper()

    @property
    def metavar(self) -> str:
        """What a value looks like, for --help."""
        if self.positional:
            return self.path[-1].upper()
        if self.kind == "table":
            return "NAME=VALUE"
        choices = self.choices
        if choices:
            return "{" + ",".join(choices) + "}"
        names = {int: "INT", float: "NUMBER", str: "TEXT"}
        for member in _members(self.field.annotation):
            if member in names:
                return names[member]
        return self.path[-1].upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of an enumeration or a Literal, or nothing."""
        found: list[str] = []
        for member in _members(self.field.annotation):
            if get_origin(member) is Literal:
                found += [str(choice) for choice in get_args(member)]
            elif isinstance(member, type) and issubclass(member, Enum):
                found += [str(choice.value) for choice in member]
        return tuple(found)


def keys_of(model: type[BaseModel]) -> tuple[Key, ...]:
    """All keys of `model`: its own as they are declared, then those of its bases."""
    hidden: frozenset[str] = getattr(model, "hidden_keys", frozenset())
    return tuple(key for key in _walk(model, ()) if key.dotted not in hidden)


def _walk(model: type[BaseModel], prefix: tuple[str, ...]) -> Iterator[Key]:
    own = model.__annotations__
    # What the model itself declares comes first, what it inherits after that.
    for name, field in sorted(model.model_fields.items(), key=lambda item: item[0] not in own):
        path = (*prefix, field.alias or name)
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _walk(annotation, path)
            continue
        positional = any(item is Positional for item in field.metadata)
        yield Key(path, field, _kind(annotation), positional)


def _kind(annotation: Any) -> Literal["value", "switch", "list", "table"]:
    if annotation is bool:
        return "switch"
    origin = get_origin(annotation)
    if origin is dict:
        return "table"
    # Only a plain list of texts or numbers: a tuple of models has a text form of its own
    # (`sync_interval`).
    if origin in (list, tuple) and get_args(annotation)[0] in (str, float):
        return "list"
    return "value"


def _members(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation: `int | None` gives int and NoneType."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _members(argument)
    elif origin is typing.Annotated:
        yield from _members(get_args(annotation)[0])
    else:
        yield annotation
