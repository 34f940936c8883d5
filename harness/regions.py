"""The map of a run: its regions, the link of each to the server, and how fast each computes.

    [regions.us-east]
    rate_mbit = 100     # Mbit/s (10^6 bits) each way; left out: as fast as this machine
    delay_ms = 40       # one way
    speed = 0.5         # half as fast as a region of speed 1
    cut = true          # its link carries nothing, for as long as the file says so

A region is one learner, and bears its name.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fragments.errors import SettingsError
from harness.link import LinkShape
from harness.nearest import did_you_mean

MOST_REGIONS = 16
SLOWEST_MBIT = 0.1
"""Under this a link is down for all practical purposes."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Region(_Table):
    """One learner's place: its link to the server, and its speed."""

    rate_mbit: float | None = Field(default=None, ge=SLOWEST_MBIT)
    """Mbit/s (10^6 bits), each way; None for no bound."""
    delay_ms: float = Field(default=0.0, ge=0, le=10_000)
    """One way; a round trip takes twice as long."""
    speed: float = Field(default=1.0, gt=0, le=1000)
    """A step takes the run's pace divided by this."""

    cut: bool = False
    """Its link carries nothing. A run cannot begin without a region; where the file is followed
    (`harness.wan`), this is how to cut one off."""

    @property
    def shape(self) -> LinkShape:
        """What its link does."""
        return LinkShape(self.rate_mbit or math.inf, self.delay_ms / 1000)

    @property
    def is_linked(self) -> bool:
        """Whether its link differs from this machine's own."""
        return self.rate_mbit is not None or self.delay_ms > 0

    def __str__(self) -> str:
        rate = "any rate" if self.rate_mbit is None else f"{self.rate_mbit:g} Mbit/s"
        return f"{rate}, {self.delay_ms:g} ms, speed {self.speed:g}"


class RegionMap(_Table):
    """All regions, in the order of the file."""

    regions: dict[Name, Region] = Field(min_length=1, max_length=MOST_REGIONS)


def load_map(path: Path) -> RegionMap:
    """The map in a TOML file.

    Raises:
        SettingsError: where it cannot be read, or says what no map does; the message names the
            place and what is known there.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the map {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not a TOML file: {error}") from error
    try:
        return RegionMap.model_validate(document)
    except ValidationError as error:
        raise SettingsError(f"{path}: {_explain(error)}") from error


def _explain(error: ValidationError) -> str:
    lines = []
    for detail in error.errors(include_url=False):
        place = [str(part) for part in detail["loc"] if part != "[key]"]
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            known = RegionMap.model_fields if len(place) == 1 else Region.model_fields
            hint = did_you_mean(place[-1], known) or f"; there are {', '.join(known)}"
            message = f"no such setting{hint}"
        elif place[:1] == ["regions"] and len(place) == 1:
            message = "the map has no regions: give each a table [regions.NAME]"
            if detail["type"] == "too_long":
                message = f"there are more than {MOST_REGIONS}"
        elif detail["type"] in ("model_type", "dict_type", "model_attributes_type"):
            message = (
                f"is no region: write a table [{'.'.join(place)}] with rate_mbit, delay_ms, speed"
            )
        elif detail["type"] == "string_pattern_mismatch":
            message = "a region's name has letters, digits, `_`, `.` and `-` only, 64 at most"
        lines.append(f"{'.'.join(place)}: {message}")
    return "; ".join(lines)
