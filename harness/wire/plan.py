"""What a wire bench is to measure, and whether this machine can."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from fragments.errors import SettingsError
from fragments.runspec import AdoptionSettings, ClosingSettings, ProgramSettings, RunSpec
from harness.wire.processes import available_bytes
from harness.wire.program import FACTORY
from harness.words import bytes_text, count_text

SMALL_PARAMS = 1000
"""The model whose processes show what memory a process takes without parameters."""

MOST_PARAMS = 2_000_000_000
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
_TENSORS_PER_FRAGMENT = 4

_SERVER_COPIES, _LEARNER_COPIES = 4.5, 2.0
"""Peaks in sizes of the model, and some: `diloco bench --params 100M` found 3.5 and 1.4."""
_PROCESS_BYTES = 400_000_000
_ENDLESS_STEPS = 10**9
_SNAPSHOT_COPIES = 3 * (3 + 1)
"""Master, momentum and broadcast copy, in three snapshots that are kept and one being written."""


def parse_params(text: str) -> int:
    """A number of parameters from "25M", "1e8" or "1000".

    Raises:
        SettingsError: for what is no such number, or not between 1,000 and MOST_PARAMS.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kMGB]?)", text.strip())
    try:
        count = round(float(match[1]) * _UNITS[match[2]]) if match else -1
    except ValueError:
        count = -1
    if not SMALL_PARAMS <= count <= MOST_PARAMS:
        raise SettingsError(
            f"{text} is no number of parameters between {count_text(SMALL_PARAMS)} and"
            f" {count_text(MOST_PARAMS)}: give 25M, 100M, 1e8 or 25000000"
        )
    return count


@dataclass(frozen=True, slots=True)
class WirePlan:
    """What to measure. `params` is a wish: `spec` rounds it up to tensors of equal size.

    After `warm_up_laps` laps over all `fragments`, `laps` are measured, with `in_flight` rounds
    under way at once; all of it must end within `limit_s` after the learners have started. So many
    `slow_readers` read beside it (`harness.wire.readers`).
    """

    out: Path
    params: int
    learners: int
    fragments: int = 24
    laps: int = 10
    warm_up_laps: int = 2
    in_flight: int = 4
    limit_s: float = 900.0
    slow_readers: int = 0

    @property
    def spec(self) -> RunSpec:
        """The run: fragments follow one another as fast as they are adopted.

        A slot falls at every step, and steps cost nothing but a moment; a learner pauses when a
        fragment that it holds has been due for `in_flight` steps. With a quorum of one the clock
        follows the fastest learner; a round waits all the same until every asked learner has
        answered.
        """
        tensors = self.fragments * _TENSORS_PER_FRAGMENT
        return RunSpec(
            budget_tokens=10**12,
            fragments=self.fragments,
            sync_interval=self.fragments,  # type: ignore[arg-type]  # a plain H; the model parses it
            min_learners=self.learners,
            max_learners=self.learners,
            max_open_rounds=self.in_flight + 1,
            # No round is closed early because this machine was busy with something else.
            closing=ClosingSettings(rule="paper", gamma=1.0, tau_steps=_ENDLESS_STEPS),
            adoption=AdoptionSettings(max_overlap_steps=self.in_flight),
            program=ProgramSettings(
                factory=FACTORY,
                settings={"tensors": tensors, "values": -(-self.params // tensors)},
            ),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The learners'."""
        return tuple(f"learner-{i + 1}" for i in range(self.learners))

    def require_room(self) -> None:
        """Raises SettingsError where memory, disk or the kind of machine do not do."""
        if sys.platform != "linux":
            raise SettingsError("diloco bench reads what processes cost from Linux's /proc")
        size = 4 * self.params
        copies = _SERVER_COPIES + _LEARNER_COPIES * self.learners
        needed = round(size * copies) + _PROCESS_BYTES * (self.learners + 1)
        if needed > (there := available_bytes()):
            raise SettingsError(
                f"{self.learners} learners of {count_text(self.params)} parameters take about"
                f" {bytes_text(needed)} of memory, and {bytes_text(there)} are free: give fewer"
            )
        needed = size * _SNAPSHOT_COPIES
        if needed > (there := shutil.disk_usage(self.out).free):
            raise SettingsError(
                f"the server's snapshots of {count_text(self.params)} parameters take up to"
                f" {bytes_text(needed)}, and {self.out} has {bytes_text(there)}: give another --out"
            )
