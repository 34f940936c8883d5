"""`diloco VERB ...`: finds the verb, loads its settings, runs it, and tells how it ended."""

from __future__ import annotations

import os
import sys
from importlib import metadata

from cli.exit import OK, OTHER, USAGE, exit_code, sentence
from cli.settings import load_settings
from cli.verb import Verb
from cli.verbs import NAMES, load_all, load_verb
from fragments.errors import DilocoError, SettingsError
from harness.nearest import did_you_mean

_DISTRIBUTION = "decoupled-diloco"


def run_command(words: list[str]) -> int:
    """Runs the command and returns its exit code (the table is in `cli.exit`).

    Whatever a person can mend ends as one sentence on stderr; only a bug shows a traceback.
    """
    try:
        return _dispatch(words)
    except DilocoError as error:
        print(sentence(error), file=sys.stderr)
        return exit_code(error)
    except BrokenPipeError:
        # The reader of our output has left (`diloco status | head`): nothing is wrong here, but
        # the interpreter must not try to flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        print(sentence(error), file=sys.stderr)
        return OTHER


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return OK if words else USAGE
    if words[0] in ("-V", "--version"):
        print(f"diloco {_version()}")
        return OK
    is_help = len(words) == 2 and words[1] in ("-h", "--help")
    if is_help and _family(words[0]) and words[0] not in NAMES:
        print(_overview_of(words[0]))
        return OK
    name, rest = _split_verb(words)
    verb = load_verb(name)
    try:
        settings = load_settings(verb, load_all(), rest)
    except SystemExit as stop:  # argparse has printed the help
        return int(stop.code or OK)
    from cli.logs import configure_logs

    configure_logs(settings, verb=name)
    verb.run(settings)
    return OK


def _split_verb(words: list[str]) -> tuple[str, list[str]]:
    """The verb's name, of one or two words, and what follows it."""
    family = _family(words[0])
    for count in (2, 1):
        name = " ".join(words[:count])
        # A word after a verb that others begin with is one of theirs, misspelt.
        is_other = count == 1 and family and len(words) > 1 and not words[1].startswith("-")
        if len(words) >= count and name in NAMES and not is_other:
            return name, words[count:]
    if family and len(words) == 1:
        raise SettingsError(f"diloco {words[0]} needs one more word: " + ", ".join(family))
    wanted = " ".join(words[:2]) if family else words[0]
    hint = did_you_mean(wanted, NAMES)
    if family and not hint:
        hint = f": there are {', '.join(family)}"
    raise SettingsError(f"there is no `diloco {wanted}`{hint} (see diloco --help)")


def _family(word: str) -> list[str]:
    """The verbs of two words that begin with `word`."""
    return [name for name in NAMES if name.startswith(word + " ")]


def _overview_of(word: str) -> str:
    verbs = [load_verb(name) for name in _family(word)]
    width = max(len(verb.name) for verb in verbs)
    lines = [f"  {verb.name:<{width}}  {verb.summary}" for verb in verbs]
    last = f"`diloco {word} VERB --help` tells all about one."
    return "\n".join([f"usage: diloco {word} VERB [settings]", "", *lines, "", last])


def _overview() -> str:
    verbs: list[Verb] = list(load_all())
    width = max(len(verb.name) for verb in verbs)
    lines = [f"  {verb.name:<{width}}  {verb.summary}" for verb in verbs]
    return "\n".join(
        [
            "usage: diloco VERB [settings]",
            "",
            "Train one model on many islands of compute that may be far apart, slow, unlike one",
            "another, or dead.",
            "",
            *lines,
            "",
            "`diloco VERB --help` tells all about a verb. Settings come from flags, from the",
            "environment (DILOCO_<KEY> or DILOCO_<VERB>_<KEY>) and from a TOML file (--config);",
            "of these the first named is the strongest.",
        ]
    )


def _version() -> str:
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "(not installed)"
