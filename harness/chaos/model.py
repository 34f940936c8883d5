"""What other ways to run a job would keep under the same outages, as a model. Pure.

Not a measurement: whoever reports a figure of these says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from harness.chaos.breaker import Befell
from harness.chaos.outages import OutageKind

_TICK_S = 0.05

_STOPS_ALL = (OutageKind.KILL, OutageKind.STOP, OutageKind.PARTITION)


def as_one_job(
    befell: Sequence[Befell], span_s: float, restart_s: float, checkpoint_s: float
) -> float:
    """Goodput of data-parallel training on learners that suffer this: useful time over all time.

    A gradient needs all of them. While one is killed, stopped or cut off nobody steps; after a kill
    all start again, which takes `restart_s`, from the newest checkpoint, of which there is one
    every `checkpoint_s` of training, free of charge; while one is slow all are. Links are wide and
    the server's outages are none of its own, so this is more than such a job would keep.
    """
    progress_s = saved_s = ready_s = 0.0
    kills = [each.began_s for each in befell if each.outage.what is OutageKind.KILL]
    for index in range(int(span_s / _TICK_S)):
        now_s = index * _TICK_S
        if any(now_s <= at_s < now_s + _TICK_S for at_s in kills):
            progress_s = saved_s
        active = [each for each in befell if each.began_s <= now_s < each.ended_s]
        if any(each.outage.what is OutageKind.KILL for each in active):
            ready_s = now_s + restart_s
        if now_s < ready_s or any(each.outage.what in _STOPS_ALL for each in active):
            continue
        progress_s += _TICK_S / max([1.0, *(each.outage.factor or 1.0 for each in active)])
        if progress_s - saved_s >= checkpoint_s:
            saved_s = progress_s
    return progress_s / span_s if span_s > 0 else 1.0


def by_papers_rule(
    befell: Sequence[Befell],
    learners: Sequence[str],
    span_s: float,
    restart_s: float,
    checkpoint_s: float,
) -> float:
    """Goodput by the rule of Decoupled DiLoCo (arXiv 2604.21428): M learners behave like one job
    that loses an M-th of its chips while one of them is away. So each is a job of its own, to which
    a cut link does nothing, and theirs is the mean.
    """
    own = [
        [e for e in befell if e.outage.whom == name and e.outage.what is not OutageKind.PARTITION]
        for name in learners
    ]
    return statistics.fmean(as_one_job(each, span_s, restart_s, checkpoint_s) for each in own)
