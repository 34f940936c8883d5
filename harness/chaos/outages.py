"""Faults by the clock: what befalls whom, when, and for how long. Pure.

A schedule is a list of `Outage`, the same for the same seed. It says nothing of how the job is run:
`downtimes` is what another way to run it can be driven by.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fragments.errors import SettingsError
from harness.nearest import did_you_mean
from harness.plan import SERVER
from harness.regions import SLOWEST_MBIT

MOST = 10_000
"""Outages in a schedule."""

_AMOUNTS = {
    "factor": "how many times longer a step is, above 1",
    "mbit": f"what the link carries in Mbit/s, {SLOWEST_MBIT:g} at least",
}


class OutageKind(StrEnum):
    """What breaks.

    KILL: a learner's process, with -9; it is started again after the repair. STOP: it stands still
    (SIGSTOP, SIGCONT). PARTITION: its link carries nothing. SLOW: its steps take longer. RATE: its
    link carries less. SERVER_KILL: the server's process, like a learner's. DISK_FULL: the server's
    disk takes nothing more.
    """

    KILL = "kill"
    STOP = "stop"
    PARTITION = "partition"
    SLOW = "slow"
    RATE = "rate"
    SERVER_KILL = "server-kill"
    DISK_FULL = "disk-full"

    @property
    def is_of_server(self) -> bool:
        """Whether it befalls the server rather than a learner."""
        return self in (OutageKind.SERVER_KILL, OutageKind.DISK_FULL)


class Outage(BaseModel):
    """`what` befalls `whom` (a learner's name, or `server`) for `for_s` seconds.

    It begins `at_s` seconds after all learners have made a step, or when `at_tokens` are trained by
    all. `factor`: of a step's time (slow); `mbit`: what the link carries in Mbit/s (rate).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    what: OutageKind
    whom: str = SERVER
    at_s: Annotated[float, Field(ge=0)] | None = None
    at_tokens: Annotated[int, Field(ge=0)] | None = None
    for_s: Annotated[float, Field(gt=0, le=86_400)]
    factor: Annotated[float, Field(gt=1)] | None = None
    mbit: Annotated[float, Field(ge=SLOWEST_MBIT)] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.at_s is None) == (self.at_tokens is None):
            raise ValueError("give at_s or at_tokens, one of them")
        for name, kind in (("factor", OutageKind.SLOW), ("mbit", OutageKind.RATE)):
            is_given = getattr(self, name) is not None
            if is_given and self.what is not kind:
                raise ValueError(f"{name} belongs to what = {str(kind)!r}, and to that alone")
            if self.what is kind and not is_given:
                raise ValueError(f"what = {str(kind)!r} takes {name}, too: {_AMOUNTS[name]}")
        if self.what.is_of_server and self.whom != SERVER:
            raise ValueError(f"{self.what} befalls the server: leave out whom = {self.whom!r}")
        if self.whom == SERVER and not self.what.is_of_server:
            raise ValueError(f"{self.what} befalls a learner: give its name as whom")
        return self

    def is_due(self, now_s: float, tokens: float) -> bool:
        """Has its moment come?"""
        if self.at_s is not None:
            return now_s >= self.at_s
        return self.at_tokens is not None and tokens >= self.at_tokens

    def __str__(self) -> str:
        amount = f" to {self.mbit:g} Mbit/s" if self.mbit else ""
        amount = f" by {self.factor:g}" if self.factor else amount
        return f"{self.what}{amount} of {self.whom} for {self.for_s:g} s"


@dataclass(frozen=True, slots=True)
class Rates:
    """How often things break. `mtbf_s`: mean time that a learner works before something breaks
    again, and the server, where `kinds` has one of its own; each is repaired after `repair_s`.
    """

    mtbf_s: float
    repair_s: float
    kinds: tuple[OutageKind, ...] = (OutageKind.KILL,)
    slow_factor: float = 3.0
    rate_mbit: float = 1.0


def draw_outages(
    rates: Rates, learners: Sequence[str], horizon_s: float, seed: int
) -> tuple[Outage, ...]:
    """A schedule of `horizon_s` seconds, in order of time: times between failures are exponential.

    Each unit has a chance of its own, so that another learner more changes nothing for the others,
    and with another MTBF the same failures come sooner or later.

    Raises:
        SettingsError: for more than MOST.
    """
    found: list[Outage] = []
    for unit in (*learners, SERVER):
        kinds = [kind for kind in rates.kinds if kind.is_of_server == (unit == SERVER)]
        chance, at_s = random.Random(f"{seed} {unit}"), 0.0
        while kinds:
            at_s += chance.expovariate(1.0) * rates.mtbf_s
            kind = chance.choice(kinds)
            if at_s >= horizon_s:
                break
            found.append(_outage(rates, kind, unit, round(at_s, 3)))
            if len(found) > MOST:
                raise SettingsError(f"more than {MOST} faults: give a longer MTBF")
            at_s += rates.repair_s
    return tuple(sorted(found, key=lambda outage: (outage.at_s or 0.0, outage.whom)))


def _outage(rates: Rates, kind: OutageKind, unit: str, at_s: float) -> Outage:
    return Outage(
        what=kind,
        whom=unit,
        at_s=at_s,
        for_s=rates.repair_s,
        factor=rates.slow_factor if kind is OutageKind.SLOW else None,
        mbit=rates.rate_mbit if kind is OutageKind.RATE else None,
    )


class Downtime(NamedTuple):
    """From `at_s` on, `learner` is not there for `down_s` seconds."""

    at_s: float
    learner: str
    down_s: float


def downtimes(outages: Iterable[Outage]) -> tuple[Downtime, ...]:
    """When which learner's process is gone: the kills of a schedule, in order of time."""
    return tuple(
        sorted(
            Downtime(outage.at_s, outage.whom, outage.for_s)
            for outage in outages
            if outage.what is OutageKind.KILL and outage.at_s is not None
        )
    )


def parse_kinds(text: str) -> tuple[OutageKind, ...]:
    """Kinds from a text such as "kill,partition,slow". SettingsError for one that is none, or where
    there is none.
    """
    known = [str(kind) for kind in OutageKind]
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            hint = did_you_mean(word, known) or f": give some of {', '.join(known)}"
            raise SettingsError(f"there is no fault {word!r}{hint}")
    if not words:
        raise SettingsError(f"--faults names none: give some of {', '.join(known)}")
    return tuple(OutageKind(word) for word in dict.fromkeys(words))


class _Script(BaseModel):
    model_config = ConfigDict(extra="forbid")

    faults: Annotated[tuple[Outage, ...], Field(min_length=1, max_length=MOST)]


def read_script(path: Path, learners: Sequence[str]) -> tuple[Outage, ...]:
    """The outages in a TOML file, each a table `[[faults]]`.

    Raises:
        SettingsError: for a file that cannot be read, is no TOML, or has anything else in it.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    try:
        faults = _Script.model_validate(document).faults
    except ValidationError as error:
        raise SettingsError(f"{path}: {_explained(error)}") from error
    for number, outage in enumerate(faults, 1):
        if outage.whom not in (SERVER, *learners):
            raise SettingsError(
                f"{path}: fault {number}: there is no learner {outage.whom!r}; there are"
                f" {', '.join(learners)}"
            )
    if both := _overlap(faults):
        one, other = both
        raise SettingsError(
            f"{path}: {one.whom} suffers one thing at a time, and at {other.at_s:g} s it has"
            f" {one.what} until {(one.at_s or 0.0) + one.for_s:g} s: begin {other.what} later"
        )
    return faults


def _overlap(faults: Sequence[Outage]) -> tuple[Outage, Outage] | None:
    """Two of the same unit that are to be at the same time; None where the script has none whose
    time is known.
    """
    last: dict[str, Outage] = {}
    timed = (outage for outage in faults if outage.at_s is not None)
    for outage in sorted(timed, key=lambda each: each.at_s or 0.0):
        before = last.get(outage.whom)
        if before is not None and (outage.at_s or 0.0) < (before.at_s or 0.0) + before.for_s:
            return before, outage
        last[outage.whom] = outage
    return None


def _explained(error: ValidationError) -> str:
    """One thing that is wrong, with the number of its fault, counted from 1."""
    # A word that nobody knows may be why another one is missing.
    details = error.errors(include_url=False)
    detail = min(details, key=lambda each: each["type"] != "extra_forbidden")
    place = [part + 1 if isinstance(part, int) else part for part in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        known = Outage.model_fields if len(place) > 1 else _Script.model_fields
        return f"{_place(place)}: no such key{did_you_mean(str(place[-1]), known)}"
    if place == ["faults"] and detail["type"] in ("missing", "too_short"):
        return "it names no fault: give each a table [[faults]]"
    if place == ["faults"]:
        return "faults is not a list of tables: write [[faults]], with two brackets, before each"
    if detail["type"] == "missing":
        return f"{_place(place)}: is missing"
    return f"{_place(place)}: {detail['msg'].removeprefix('Value error, ')}"


def _place(parts: Sequence[object]) -> str:
    words = ["fault" if part == "faults" and len(parts) > 1 else str(part) for part in parts]
    return " ".join(words)
