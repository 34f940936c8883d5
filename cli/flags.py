"""The command line of a verb, generated from its settings model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from cli.keys import Key, keys_of
from cli.sources import Found, set_path
from cli.verb import Verb
from fragments.errors import SettingsError
from harness.nearest import did_you_mean


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is a domain error rather than an exit."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message} (see {self.prog} --help)")


def parse_flags(verb: Verb, argv: Sequence[str], misplaced: Mapping[str, str]) -> Found:
    """The settings that `argv` gives, as texts; `--help` prints and raises SystemExit(0).

    `misplaced` maps flags that this verb does not take, but another one does, to the sentence that
    says where they belong. The key `config` of the answer holds the path after --config.

    Raises:
        SettingsError: for an unknown flag (with the nearest known one) or a missing value.
    """
    keys = keys_of(verb.settings)
    parser = _build(verb, keys)
    names, rest = parser.parse_known_args(list(argv))
    if rest:
        raise SettingsError(_unknown(rest, verb, keys, misplaced))
    found = Found()
    for key in keys:
        value = getattr(names, key.dotted, None)
        if value is None or (key.positional and value == []):
            continue
        if key.kind == "table":
            value = dict(_pair(text, key.flag) for text in value)
        set_path(found.values, key.path, value)
        found.origin[key.dotted] = key.path[-1].upper() if key.positional else key.flag
    if names.config is not None:
        found.origin["config"] = names.config
    return found


def _build(verb: Verb, keys: Sequence[Key]) -> _Parser:
    places = "".join(f" {_place(key)}" for key in keys if key.positional)
    parser = _Parser(
        prog=f"diloco {verb.name}",
        # Not argparse's own, which would list every flag: the longest verb has two dozen.
        usage=f"diloco {verb.name}{places} [settings]",
        description=verb.details,
        epilog=verb.examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"TOML file with settings, at its top or under [{verb.name.replace(' ', '.')}];"
        " environment variables (DILOCO_...) and flags are stronger",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for key in keys:
        section = ".".join(key.path[:-1])
        if section and section not in groups:
            groups[section] = parser.add_argument_group(section)
        _add(groups[section] if section else parser, key)
    return parser


def _place(key: Key) -> str:
    """As `usage` has it: `RUN_DIR`, `[LEARNER]`, `CHANGES...`."""
    more = "..." if key.kind == "list" else ""
    text = f"{key.metavar}{more}"
    return text if key.field.is_required() else f"[{text}]"


def _add(group: argparse._ActionsContainer, key: Key) -> None:
    text = _help(key.field)
    if key.positional and key.kind == "list":
        group.add_argument(key.dotted, metavar=key.metavar, nargs="*", default=None, help=text)
    elif key.positional:
        group.add_argument(key.dotted, metavar=key.metavar, nargs="?", help=text)
    elif key.kind == "switch":
        group.add_argument(
            key.flag,
            dest=key.dotted,
            action=argparse.BooleanOptionalAction,
            default=None,
            help=text,
        )
    elif key.kind == "list":
        group.add_argument(
            key.flag,
            dest=key.dotted,
            metavar=key.metavar,
            nargs="+",
            action="extend",
            default=None,
            help=text,
        )
    elif key.kind == "table":
        group.add_argument(
            key.flag,
            dest=key.dotted,
            metavar=key.metavar,
            action="append",
            default=None,
            help=text,
        )
    else:
        group.add_argument(key.flag, dest=key.dotted, metavar=key.metavar, help=text)


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    default = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required() or default is None or default in ((), {}, ""):
        return text.replace("%", "%%")
    return f"{text} (default: {_show(default)})".strip().replace("%", "%%")


def _show(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple) and hasattr(default[0], "from_share"):
        return ",".join(f"{stage.from_share:g}:{stage.steps}" for stage in default)
    if isinstance(default, tuple | list):
        return " ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in default)
    return str(getattr(default, "value", default))


def _pair(text: str, flag: str) -> tuple[str, Any]:
    """`width=128` as ("width", 128): a value that reads as JSON is that, any other is a text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise SettingsError(f"{flag} {text}: give NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _unknown(
    rest: Sequence[str], verb: Verb, keys: Sequence[Key], misplaced: Mapping[str, str]
) -> str:
    flags = [word.partition("=")[0] for word in rest if word.startswith("-")]
    if not flags:
        return f"diloco {verb.name} does not know what to do with {' '.join(rest)!r}"
    for flag in flags:
        if flag in misplaced:
            return f"{flag} {misplaced[flag]}"
    known = [key.flag for key in keys if not key.positional] + ["--config", "--help"]
    return f"diloco {verb.name} has no flag {flags[0]}{did_you_mean(flags[0], known)}"
