"""Goodput, uptime and what learners did while the server was away: from stamps and receipts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from harness.chaos.result import Away

Span = tuple[float, float]


def counted(stamps: Sequence[float], last_receipt_s: float | None) -> list[float]:
    """The steps of a process of which it handed something in later."""
    return [at_s for at_s in stamps if last_receipt_s is not None and at_s <= last_receipt_s]


def uptime(steps: Sequence[float], span: Span, held: Sequence[Span]) -> float:
    """Share of the whole seconds of `span` in which a step was made; those in which training was
    held are left out. 1 where nothing is left.
    """
    made = {int(at_s - span[0]) for at_s in steps if span[0] <= at_s < span[1]}
    seconds = [
        second
        for second in range(int(span[1] - span[0]))
        if not any(a < span[0] + second + 1 and span[0] + second < b for a, b in held)
    ]
    return sum(second in made for second in seconds) / len(seconds) if seconds else 1.0


def length(spans: Sequence[Span]) -> float:
    """Of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def away(steps: Mapping[str, Sequence[float]], span: Span) -> Away:
    """What learners did within `span`; `steps`: of each process that was there all the time."""
    pauses = []
    made = {}
    for name, stamps in steps.items():
        within = [at_s for at_s in stamps if span[0] <= at_s <= span[1]]
        made[name] = len(within)
        edges = [span[0], *within, span[1]]
        pauses += [b - a for a, b in pairwise(edges)]
    return Away(
        seconds=round(span[1] - span[0], 1),
        steps=made,
        longest_pause_s=round(max(pauses, default=0.0), 2),
    )
