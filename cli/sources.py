"""Settings from a TOML file and from the environment, with every unknown key refused."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.keys import Key, keys_of
from cli.verb import Verb
from fragments.errors import SettingsError
from fragments.overlay import overlay
from fragments.runspec import RunSpec
from harness.nearest import did_you_mean

PREFIX = "DILOCO_"
RUN_SETTING = (
    "is a setting of the run: `diloco init` sets it and the server tells it to everybody who joins"
)
_RUN_FIELDS = frozenset(RunSpec.model_fields)


@dataclass(slots=True)
class Found:
    """Settings of one source, nested as in the model; `origin` names the place by dotted key."""

    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)


def set_path(values: MutableMapping[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets `values[a][b][c]` for the path (a, b, c), making what is missing on the way."""
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value


def is_run_setting(dotted: str) -> bool:
    """Does the key belong to the run rather than to a process?"""
    return dotted.partition(".")[0] in _RUN_FIELDS


def from_environment(verb: Verb, verbs: Sequence[Verb], environ: Mapping[str, str]) -> Found:
    """The settings in `environ` that concern `verb`; an empty variable counts as unset.

    `DILOCO_<KEY>` is for every verb that knows the key, `DILOCO_<VERB>_<KEY>` for one verb and
    stronger; `__` steps into a table. Variables of other verbs are checked by name and left alone.

    Raises:
        SettingsError: for a variable with the prefix that names no key of any verb, and for a run
            setting meant for a verb that does not take it.
    """
    found, own = Found(), Found()
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or not environ[variable]:
            continue
        owners = _owners(variable, verbs)
        if not owners:
            raise SettingsError(_unknown_variable(variable, verbs))
        for owner, key, common in owners:
            if owner is verb:
                target = found if common else own
                set_path(target.values, key.path, _from_text(key, environ[variable]))
                target.origin[key.dotted] = variable
        common_key = next((key for _, key, common in owners if common), None)
        if common_key and all(owner is not verb for owner, _, _ in owners):
            refuse_run_setting(common_key.dotted, variable, verb)
    return merge(found, own)


def _owners(variable: str, verbs: Sequence[Verb]) -> list[tuple[Verb, Key, bool]]:
    """The verbs that a variable speaks to, with the key and whether it is the common spelling."""
    name = variable.removeprefix(PREFIX)
    owners = []
    for verb in verbs:
        for key in keys_of(verb.settings):
            if key.variable == name:
                owners.append((verb, key, True))
            elif f"{verb.prefix}_{key.variable}" == name:
                owners.append((verb, key, False))
    return owners


def _unknown_variable(variable: str, verbs: Sequence[Verb]) -> str:
    keys = [(verb, key) for verb in verbs for key in keys_of(verb.settings)]
    known = {PREFIX + key.variable for _, key in keys}
    known |= {f"{PREFIX}{verb.prefix}_{key.variable}" for verb, key in keys} | {PREFIX + "CONFIG"}
    return f"the environment variable {variable} names no setting{did_you_mean(variable, known)}"


def _from_text(key: Key, text: str) -> Any:
    if key.kind == "list":
        return [item.strip() for item in text.split(",") if item.strip()]
    if key.kind == "table":
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(
                f"{PREFIX}{key.variable} must be a TOML table such as {{ width = 64 }}: {error}"
            ) from error
    return text


def from_file(verb: Verb, verbs: Sequence[Verb], path: Path) -> Found:
    """The settings in a TOML file that concern `verb`.

    Keys at the top are for every verb that knows them, keys under `[<verb>]` for one verb and
    stronger. Sections of other verbs are checked by name and left alone.

    Raises:
        SettingsError: for a file that cannot be read, that is not TOML, or that has a key that
            nobody knows, and for a run setting meant for a verb that does not take it.
    """
    document = _read(path)
    sections: dict[str, dict[str, Any]] = {}
    # `[bench.pace]` lies in `[bench]`, which is a verb's own section too.
    for each in sorted(verbs, key=lambda each: -len(each.name.split())):
        section = _take_section(document, each.name.split(), path)
        if section is not None:
            sections[each.name] = section
            _check_names(section, each, [each], f"{path} [{each.name.replace(' ', '.')}]")
    _check_names(document, verb, verbs, str(path))
    common = _pick(verb, document, str(path))
    return merge(common, _pick(verb, sections.get(verb.name, {}), str(path)))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not a TOML file: {error}") from error


def _take_section(
    document: dict[str, Any], words: Sequence[str], path: Path
) -> dict[str, Any] | None:
    """Removes and returns the table `[a.b]`, and its emptied parents with it."""
    head, rest = words[0], words[1:]
    if head not in document:
        return None
    inner = document[head]
    if not isinstance(inner, dict):
        raise SettingsError(f"{path}: {head} must be a table, [{head}]")
    if not rest:
        # A parsed document's values are Any; that this one is a table was checked above.
        return document.pop(head)  # type: ignore[no-any-return]
    section = _take_section(inner, rest, path)
    if not inner:
        del document[head]
    return section


def _check_names(table: Mapping[str, Any], verb: Verb, verbs: Sequence[Verb], where: str) -> None:
    """Every key of `table` is one of `verbs`', and one that `verb` may see."""
    known = {key.dotted for each in verbs for key in keys_of(each.settings)}
    own = {key.dotted for key in keys_of(verb.settings)}
    for dotted in _leaves(table, verbs, ()):
        if dotted not in known:
            names = known | {each.name for each in verbs if len(verbs) > 1}
            raise SettingsError(f"{where} has an unknown key {dotted}{did_you_mean(dotted, names)}")
        if dotted not in own:
            refuse_run_setting(dotted, f"{where}: {dotted}", verb)


def refuse_run_setting(dotted: str, place: str, verb: Verb) -> None:
    """Raises SettingsError if `dotted` is a run setting, which `verb` is known not to take."""
    if is_run_setting(dotted):
        raise SettingsError(
            f"{place} {RUN_SETTING}; `diloco {verb.name}` cannot change it"
            " (in a file shared by several verbs it belongs under [init])"
        )


def _leaves(table: Mapping[str, Any], verbs: Sequence[Verb], prefix: tuple[str, ...]) -> list[str]:
    """Dotted names of all values; a table that is itself a setting counts as one value."""
    tables = {key.dotted for each in verbs for key in keys_of(each.settings) if key.kind == "table"}
    leaves: list[str] = []
    for name, value in table.items():
        path = (*prefix, name)
        if isinstance(value, Mapping) and ".".join(path) not in tables:
            leaves += _leaves(value, verbs, path) or [".".join(path)]
        else:
            leaves.append(".".join(path))
    return leaves


def _pick(verb: Verb, table: Mapping[str, Any], where: str) -> Found:
    found = Found()
    for key in keys_of(verb.settings):
        value: Any = table
        for name in key.path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            set_path(found.values, key.path, value)
            found.origin[key.dotted] = where
    return found


def merge(weak: Found, strong: Found) -> Found:
    """Both, and where both have a key, the strong one's; tables are merged key by key."""
    return Found(overlay(weak.values, strong.values), {**weak.origin, **strong.origin})
