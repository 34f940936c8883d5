"""Settings as a TOML file, for the standard library reads TOML but does not write it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """One `[table]` after another, values inline. What is None is left out.

    Takes what JSON has: texts, numbers, booleans, lists and tables of them.
    """
    blocks = []
    for title, table in tables.items():
        lines = [f"[{title}]"]
        lines += [f"{_key(key)} = {_value(value)}" for key, value in table.items()
                  if value is not None]  # fmt: skip
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _key(name: str) -> str:
    plain = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if plain else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        inner = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return "{ " + ", ".join(inner) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _text(text: str) -> str:
    # A JSON string is a TOML basic string, but for the one control character that JSON allows raw.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
