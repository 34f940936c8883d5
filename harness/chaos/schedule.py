"""Which faults befall a run, and when: a pure function of the plan and its seed.

Two lanes run beside each other, one for the server and one for the learners. A lane is divided into
stretches of the token budget, one for each of its faults. A fault falls somewhere in its stretch,
and whatever it broke must work again before the next stretch begins.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.chaos.points import AT_START, POINTS, Deed, Point

EARLY_SHARE = 0.15
"""Share of the kills at random instants that come while the server recovers from the one before."""

_LATEST = 0.7
"""A fault falls into the first part of its stretch."""

_MOST_TIMES = {
    Deed.PAYLOAD_WRITE: 12,
    Deed.PAYLOAD_SYNC: 12,
    Deed.TAPE_COMMIT: 24,
    Deed.SNAPSHOT_WRITE: 24,
    Deed.SNAPSHOT_SYNC: 5,
    Deed.ACKNOWLEDGE: 12,
}
"""How often a point may be passed before the trap springs there; 1 for what happens seldom."""


class FaultKind(StrEnum):
    """What happens to a process."""

    SERVER_KILL = "server kill"
    SERVER_POINT = "server kill at a point"
    SERVER_AWAY = "server away"
    LEARNER_KILL = "learner kill"
    LEARNER_STOP = "learner stop"


_WEIGHTS = {FaultKind.SERVER_AWAY: 4.0, FaultKind.SERVER_POINT: 2.0, FaultKind.LEARNER_STOP: 2.0}
"""How long a stretch is; 1 for all else. These take a while in which training is not held."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `begin`, `at`, `end`: shares of the budget; `draw` in [0, 1) chooses the learner.

    `early`: not in its turn, but while the server that the fault before killed comes back, after
    the share `draw` of the time that this takes.
    """

    kind: FaultKind
    begin: float
    at: float
    end: float
    draw: float
    early: bool = False
    point: Point | None = None
    times: int = 1


@dataclass(frozen=True, slots=True)
class Faults:
    """How many of each kind. `point_kills` at each named point; `server_away_s` 0 for none."""

    server_kills: int = 0
    point_kills: int = 0
    server_away_s: float = 0.0
    learner_kills: int = 0
    learner_stops: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The lanes, each in order of time."""

    server: tuple[Fault, ...]
    learners: tuple[Fault, ...]


def make_schedule(faults: Faults, seed: int) -> Schedule:
    """The same for the same seed; in one part of a lane all kinds are mixed."""
    chance = random.Random(seed)
    server, learners = _kinds(faults)
    points = list(POINTS) * faults.point_kills
    chance.shuffle(points)
    return Schedule(_lane(server, points, chance), _lane(learners, [], chance))


def stretches(faults: Faults) -> float:
    """How many stretches of length 1 the longer lane has, with one more at the end."""
    return max(_length(kinds) for kinds in _kinds(faults))


def _kinds(faults: Faults) -> tuple[list[FaultKind], list[FaultKind]]:
    """What is in each lane."""
    server = [FaultKind.SERVER_KILL] * faults.server_kills
    server += [FaultKind.SERVER_POINT] * (faults.point_kills * len(POINTS))
    server += [FaultKind.SERVER_AWAY] * (faults.server_away_s > 0)
    learners = [FaultKind.LEARNER_KILL] * faults.learner_kills
    learners += [FaultKind.LEARNER_STOP] * faults.learner_stops
    return server, learners


def _length(kinds: Sequence[FaultKind]) -> float:
    return sum(_WEIGHTS.get(kind, 1.0) for kind in kinds) + 1.0


def _lane(
    kinds: Sequence[FaultKind], points: list[Point], chance: random.Random
) -> tuple[Fault, ...]:
    kinds = list(kinds)
    chance.shuffle(kinds)
    whole, begin, lane = _length(kinds), 0.0, list[Fault]()
    for kind in kinds:
        end = begin + _WEIGHTS.get(kind, 1.0) / whole
        at = begin + chance.random() * _LATEST * (end - begin)
        follows_kill = bool(lane) and lane[-1].kind is FaultKind.SERVER_KILL
        early = kind is FaultKind.SERVER_KILL and follows_kill and chance.random() < EARLY_SHARE
        point = points.pop() if kind is FaultKind.SERVER_POINT else None
        times = chance.randint(1, _MOST_TIMES.get(point.deed, 1)) if point is not None else 1
        if point is not None and point.deed in AT_START:
            times = 1
        lane.append(Fault(kind, begin, at, end, chance.random(), early, point, times))
        begin = end
    return tuple(lane)
