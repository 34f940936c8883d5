"""What a local run of several islands consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fragments.errors import SettingsError
from fragments.runspec import RunSpec
from harness.drill import KillOrder
from harness.link import LinkShape
from harness.regions import RegionMap

_FAST_NAMES = ("eu-west", "us-east", "us-west", "eu-north", "sa-east", "af-south", "au-east")
SLOW_NAME = "asia-slow"
EVALUATOR = "evaluator"
SERVER = "server"


@dataclass(frozen=True, slots=True)
class Island:
    """One learner. `pace_s`: least seconds from one step to the next, 0 for as fast as it can.
    `link`: what lies between it and the server; None for this machine's loopback alone.
    """

    name: str
    pace_s: float
    link: LinkShape | None = None


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """A local run: one server, its islands and an evaluator, as processes of this machine.

    `out` gets the run directory, logs, summary and plot. The first island begins alone; the others
    are started when it has trained `lead_share` of the budget. `max_restarts` bounds the restarts
    of each learner, which goes on from its newest checkpoint. A run that is not finished after
    `wall_limit_s` is ended with an error. `image`: all of it runs in containers of that image; None
    for processes of this machine.
    """

    out: Path
    spec: RunSpec
    islands: tuple[Island, ...]
    data: str | None = None
    lead_share: float = 0.0
    kills: tuple[KillOrder, ...] = ()
    evaluate_every_s: float = 2.0
    wall_limit_s: float = 900.0
    max_restarts: int = 3
    checkpoint_every_s: float = 10.0
    baselines: bool = True
    image: str | None = None

    def log(self, name: str) -> Path:
        """Where the process `name` writes."""
        return self.out / "logs" / f"{name}.log"


def make_islands(count: int, pace_s: float, slow_factor: float) -> tuple[Island, ...]:
    """`count` islands, the last of them `slow_factor` times slower (1: as fast as the others).

    Raises:
        SettingsError: for a slow island that is not slowed because nothing is paced.
    """
    if slow_factor != 1 and pace_s <= 0:
        raise SettingsError("a slow learner needs a pace: give --pace-s, or --slow-factor 1")
    slow = 1 if slow_factor != 1 and count > 1 else 0
    names = [
        _FAST_NAMES[i] if i < len(_FAST_NAMES) else f"island-{i + 1}" for i in range(count - slow)
    ]
    islands = [Island(name, pace_s) for name in names]
    if slow:
        islands.append(Island(SLOW_NAME, pace_s * slow_factor))
    return tuple(islands)


def islands_of(regions: RegionMap, pace_s: float) -> tuple[Island, ...]:
    """The islands of a map, in its order; one of speed 1 makes a step in `pace_s`.

    Raises:
        SettingsError: for regions of different speeds when nothing is paced, or one that is
            cut off.
    """
    if away := [name for name, region in regions.regions.items() if region.cut]:
        raise SettingsError(f"a run cannot begin with {away[0]} cut off: leave out its cut")
    if pace_s <= 0 and len({region.speed for region in regions.regions.values()}) > 1:
        raise SettingsError("regions of different speeds need a pace: give --pace-s")
    return tuple(
        Island(name, pace_s / region.speed, region.shape if region.is_linked else None)
        for name, region in regions.regions.items()
    )


def names_of(islands: Sequence[Island]) -> list[str]:
    """The learners' names, in order."""
    return [island.name for island in islands]
