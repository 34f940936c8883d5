"""Settings laid over settings. Imports neither jax nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def overlay(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
    """`weak` overridden by `strong`, table by table; neither is changed."""
    merged = dict(weak)
    for name, value in strong.items():
        below = merged.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[name] = overlay(below, value)
        else:
            merged[name] = value
    return merged
