"""How soon what broke was of use again, and where the learners' time went. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from harness.chaos.breaker import Befell
from harness.chaos.figures import Span, length
from harness.chaos.outages import OutageKind
from harness.chaos.result import KindFigures, Spent, Spread
from harness.plan import SERVER

Times = Mapping[str, Sequence[float]]
"""Of each unit, in order."""


def first_after(times: Sequence[float], at_s: float) -> float | None:
    """The first of `times` at or after a moment."""
    return min((each for each in times if each >= at_s), default=None)


def by_kind(befell: Sequence[Befell], works: Times, counts: Times) -> dict[str, KindFigures]:
    """Figures of each kind of outage that came.

    Args:
        befell: the outages.
        works: when each learner made a step, and when the server was heard.
        counts: when each learner heard that a contribution of its was taken; of the server, any.
    """
    kinds = sorted(befell, key=lambda each: list(OutageKind).index(each.outage.what))
    return {
        str(kind): _figures(list(group), works, counts)
        for kind, group in groupby(kinds, key=lambda each: each.outage.what)
    }


def _figures(befell: Sequence[Befell], works: Times, counts: Times) -> KindFigures:
    return KindFigures(
        count=len(befell),
        down_s=Spread.of([each.ended_s - each.began_s for each in befell]),
        works_again_s=Spread.of(delays(befell, works)),
        counts_again_s=Spread.of(delays(befell, counts)),
    )


def delays(befell: Sequence[Befell], times: Times) -> list[float]:
    """Seconds from the beginning of each outage to the first sign of its unit after its end; none
    for one that gave no sign any more, because the run was over or the next outage came first.
    """
    found = []
    for each in befell:
        unit = each.outage.whom
        sign_s = first_after(times.get(unit, ()), each.ended_s)
        later = [b.began_s for b in befell if b.outage.whom == unit and b.began_s > each.began_s]
        if sign_s is not None and sign_s < min(later, default=float("inf")):
            found.append(sign_s - each.began_s)
    return found


def restarts(befell: Sequence[Befell], steps: Times) -> list[float]:
    """Seconds from the repair of each learner that was killed to its first step."""
    kills = [each for each in befell if each.outage.what is OutageKind.KILL]
    return [
        each - kill.outage.for_s
        for kill in kills
        for each in delays([kill], steps)
    ]  # fmt: skip


def spent(
    befell: Sequence[Befell],
    steps: Times,
    span: Span,
    paces_s: Mapping[str, float],
    merged: float,
    gaps: Mapping[str, float],
) -> Spent:
    """Shares of the learners' time within `span`, which sum to 1.

    Args:
        befell: the outages.
        steps: when each learner made one.
        span: the run.
        paces_s: what a step of each takes.
        merged: the goodput.
        gaps: steps that were not merged, by reason, to which the steps that are missing between
            those made and those merged are put down in proportion.
    """
    whole_s = length([span]) * len(steps)
    down_s = returning_s = slowed_s = made_s = 0.0
    for name, times in steps.items():
        mine = [each for each in befell if each.outage.whom == name]
        made_s += _made_s(times, span, paces_s[name])
        for each in mine:
            window = _within((each.began_s, each.ended_s), span)
            if each.outage.what in (OutageKind.KILL, OutageKind.STOP):
                down_s += length([window])
                back_s = first_after(times, each.ended_s)
                later = [other.began_s for other in mine if other.began_s > each.began_s]
                until_s = min([span[1], *later, *([back_s] if back_s is not None else [])])
                returning_s += length([_within((each.ended_s, until_s), span)])
            elif each.outage.what is OutageKind.SLOW:
                slowed_s += max(0.0, length([window]) - _made_s(times, window, paces_s[name]))
    unmerged = max(0.0, made_s / whole_s - merged)
    total = sum(gaps.values())
    rest_s = whole_s - down_s - returning_s - slowed_s - max(made_s, merged * whole_s)
    return Spent(
        merged=round(merged, 4),
        down=round(down_s / whole_s, 4),
        returning=round(returning_s / whole_s, 4),
        slowed=round(slowed_s / whole_s, 4),
        unmerged={why: round(unmerged * n / total, 4) for why, n in gaps.items() if total},
        slower=round(rest_s / whole_s, 4),
    )


def _made_s(times: Sequence[float], span: Span, pace_s: float) -> float:
    """What the steps within `span` take at that pace."""
    return pace_s * sum(span[0] <= at_s < span[1] for at_s in times)


def _within(one: Span, span: Span) -> Span:
    begin, end = max(one[0], span[0]), min(one[1], span[1])
    return begin, max(begin, end)


def signs(steps: Times, heard: Sequence[float]) -> dict[str, Sequence[float]]:
    """When each unit showed that it works: learners by steps, the server by being heard."""
    return {**steps, SERVER: heard}
