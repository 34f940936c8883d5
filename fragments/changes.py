"""Which settings of a run may be changed while it is trained, and why the others may not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from fragments.errors import SettingsError
from fragments.overlay import overlay
from fragments.runspec import RunSpec

CHANGEABLE = frozenset(
    {
        "budget_tokens",
        "sync_interval",
        "quorum",
        "min_learners",
        "max_open_rounds",
        "staleness_bound",
        "weight_bound",
        "closing_lap_s",
        "closing_lap",
        "merge",
        "asked",
        "late",
        "closing.rule",
        "closing.gamma",
        "closing.tau_steps",
        "outer.learning_rate",
        "outer.momentum",
        "outer.nesterov",
    }
)
"""What only the server acts on, or what learners are told with its progress."""

_IDENTITY = "it says what is trained, and all that was trained so far was trained with it"
_AT_START = "learners have read it when they were started"
_STATE = "another outer optimizer has another state than the one that the run has by now"

FIXED: Mapping[str, str] = {
    "spec_version": _IDENTITY,
    "run_id": _IDENTITY,
    "seed": _IDENTITY,
    "program": _IDENTITY,
    "fragments": "the layout of the parameters is made with it",
    "max_learners": "the data is cut into so many shards",
    "lease_ttl_s": "learners were told it when they joined, and report so often",
    "adoption": _AT_START,
    "codec": _AT_START,
    "inner_warmup_steps": _AT_START,
    "outer.factory": _STATE,
    "outer.settings": _STATE,
}
"""Why not, by key or by the table that a key is in."""


def changed(spec: RunSpec, changes: Sequence[tuple[str, str]]) -> RunSpec:
    """`spec` with other values for some of its keys (`closing.rule`), given as texts.

    Raises SettingsError for a key that is unknown or may not be changed, and where what comes out
    is no valid set of settings; all or none are changed.
    """
    values: dict[str, Any] = {}
    given = [key for key, _ in changes]
    for key, text in changes:
        _check_key(key)
        if given.count(key) > 1:
            raise SettingsError(f"{key} is given more than once")
        table, _, name = key.rpartition(".")
        values = overlay(values, {table: {name: text}} if table else {name: text})
    try:
        return RunSpec.model_validate(overlay(spec.model_dump(), values))
    except ValidationError as error:
        raise SettingsError(_explain(error)) from error


def keys_of(model: type[BaseModel] = RunSpec, prefix: str = "") -> Iterator[str]:
    """Every key of a run's settings, dotted."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def value_of(spec: RunSpec, key: str) -> str:
    """The value of a key as a text, for people."""
    value: Any = spec
    for name in key.split("."):
        value = getattr(value, name)
    if key == "sync_interval":
        return ",".join(f"{stage.from_share:g}:{stage.steps}" for stage in spec.sync_interval)
    return str(value)


def _check_key(key: str) -> None:
    if key in CHANGEABLE:
        return
    for fixed in (key, key.partition(".")[0]):
        if fixed in FIXED:
            raise SettingsError(f"{key} cannot be changed while the run is trained: {FIXED[fixed]}")
    raise SettingsError(f"{key!r} is no setting of a run{_nearest(key, keys_of())}")


def _nearest(key: str, known: Iterable[str]) -> str:
    key, words = key.replace("-", "_"), {each: each for each in known}
    table = key[: key.rfind(".") + 1]
    if table and any(each.startswith(table) for each in words):
        # The table's name, which is right, makes no key near.
        words = {each.removeprefix(table): each for each in words if each.startswith(table)}
        key = key.removeprefix(table)
    close = difflib.get_close_matches(key, list(words), n=1, cutoff=0.7)
    if close:
        return f": did you mean {words[close[0]]}?"
    return f"; those that can be changed are {', '.join(sorted(CHANGEABLE))}"


def _explain(error: ValidationError) -> str:
    lines = []
    for detail in error.errors(include_url=False):
        key = ".".join(str(part) for part in detail["loc"] if isinstance(part, str))
        message = detail["msg"].removeprefix("Value error, ")
        given = f" {detail['input']!r}" if isinstance(detail["input"], str) else ""
        lines.append(f"{key}{given}: {message}" if key else message)
    return "; ".join(lines)
