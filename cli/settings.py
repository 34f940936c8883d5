"""A verb's settings: flags are stronger than the environment, and that than the TOML file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from cli.flags import parse_flags
from cli.keys import VerbSettings, keys_of
from cli.sources import (
    PREFIX,
    RUN_SETTING,
    Found,
    from_environment,
    from_file,
    is_run_setting,
    merge,
)
from cli.verb import Verb
from fragments.errors import SettingsError


def load_settings(
    verb: Verb,
    verbs: Sequence[Verb],
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
) -> VerbSettings:
    """The settings of `verb`, an instance of `verb.settings`; flags beat environment beats file.

    `verbs` are all verbs of the command: a key of another one is left alone, a key of none is an
    error. `environ` defaults to the process environment.

    Raises:
        SettingsError: for an unknown key (naming the nearest known one), a run setting given to a
            verb that does not take it, a value of the wrong kind, or a missing one; the message
            names the place that the value came from.
        SystemExit: with 0, after printing, for --help.
    """
    environ = os.environ if environ is None else environ
    flags = parse_flags(verb, argv, _misplaced(verb, verbs))
    environ = dict(environ)
    config = flags.origin.pop("config", "") or environ.get(PREFIX + "CONFIG", "")
    environ.pop(PREFIX + "CONFIG", None)
    found = from_file(verb, verbs, Path(config)) if config else Found()
    found = merge(found, from_environment(verb, verbs, environ))
    found = merge(found, flags)
    try:
        return verb.settings.model_validate(found.values)
    except ValidationError as error:
        raise SettingsError(_explain(error, verb, found.origin)) from error


def _misplaced(verb: Verb, verbs: Sequence[Verb]) -> dict[str, str]:
    """Flags of run settings that `verb` does not take, with the sentence that says so."""
    own = {key.flag for key in keys_of(verb.settings)}
    others = [key for each in verbs for key in keys_of(each.settings) if key.flag not in own]
    sentence = f"{RUN_SETTING}; `diloco {verb.name}` cannot change it"
    return {key.flag: sentence for key in others if is_run_setting(key.dotted)}


def _explain(error: ValidationError, verb: Verb, origin: Mapping[str, str]) -> str:
    """One line for every wrong value: where it came from, what is wrong, what was given."""
    keys = {key.dotted: key for key in keys_of(verb.settings)}
    lines = []
    for detail in error.errors(include_url=False):
        path = [str(part) for part in detail["loc"]]
        dotted = next(
            (".".join(path[:n]) for n in range(len(path), 0, -1) if ".".join(path[:n]) in keys), ""
        )
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "missing" and dotted:
            key = keys[dotted]
            name = key.metavar if key.positional else f"{key.flag} {key.metavar}"
            lines.append(f"{name} is missing: {key.field.description}")
        elif dotted:
            given = detail["input"]
            lines.append(
                f"{origin.get(dotted, dotted)} {given}: {message[0].lower()}{message[1:]}"
                if origin.get(dotted, "").startswith("-")
                else f"{dotted} = {given!r} ({origin.get(dotted, 'default')}): {message}"
            )
        else:
            lines.append(message)
    return "; ".join(lines) + f" (see diloco {verb.name} --help)"
