"""The verbs of `diloco`. Each module holds one `VERB`; none imports jax before it runs."""

from __future__ import annotations

import importlib

from cli.verb import Verb

NAMES = (
    "init",
    "serve",
    "learn",
    "evaluate",
    "run",
    "status",
    "health",
    "events",
    "replay",
    "snapshot",
    "export",
    "admin drain",
    "admin release",
    "admin evict",
    "admin set",
    "admin snapshot",
    "admin rollback",
    "admin stop",
    "bench",
    "bench pace",
    "bench links",
    "bench overhead",
    "bench journal",
    "bench faults",
    "chaos",
    "study run",
    "study table",
    "study check",
)
"""In the order in which a person meets them."""


def load_verb(name: str) -> Verb:
    """The verb of that name, which must be one of NAMES."""
    module = importlib.import_module(f"cli.verbs.{name.replace(' ', '_')}")
    verb: Verb = module.VERB
    return verb


def load_all() -> tuple[Verb, ...]:
    """Every verb, in the order of NAMES."""
    return tuple(load_verb(name) for name in NAMES)
