"""Stretches of whole numbers."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]
"""[start, stop)."""


def without(spans: Iterable[Span], *holes: Span) -> list[Span]:
    """What is left of `spans`, in their order."""
    left = list(spans)
    for start, stop in holes:
        if start < stop:
            parts = [((a, min(b, start)), (max(a, stop), b)) for a, b in left]
            left = [(a, b) for both in parts for a, b in both if a < b]
    return left


def length(spans: Iterable[Span]) -> int:
    """Numbers in them."""
    return sum(stop - start for start, stop in spans)
