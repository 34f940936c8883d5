"""What a chaos run consists of."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from fragments.runspec import CodecSettings, OuterSettings, ProgramSettings, RunSpec
from harness.chaos.outages import Outage, OutageKind
from harness.chaos.schedule import Faults, Schedule, make_schedule, stretches
from harness.link import CLEAR, LinkShape
from harness.plan import Island, make_islands

TOKENS_PER_LEARNER = 300_000
"""Of a run whose faults come by the clock: two minutes at ten steps a second."""

KEEP_ALL = 1_000_000
"""Snapshots kept: more than there will be, so that the tape reaches back to the run's birth."""


def small_spec() -> RunSpec:
    """The run of `diloco chaos`: a byte-level transformer of 27 thousand parameters, synchronised
    often, with leases short enough to lapse within it.
    """
    return RunSpec(
        fragments=3,
        sync_interval=12,  # type: ignore[arg-type]  # a plain H; the model parses it
        lease_ttl_s=6.0,
        outer=OuterSettings(learning_rate=0.7, momentum=0.3),
        codec=CodecSettings(block=256),
        program=ProgramSettings(
            settings={"width": 32, "depth": 1, "heads": 2, "seq_len": 32, "batch_size": 8}
        ),
    )


def small_data() -> str:
    """Text for it: half a million bytes of Python's standard library, which are read in a moment by
    each process that is started again.
    """
    return str(Path(asyncio.__file__).parent / "*.py")


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """A run and what befalls it. `out` gets all of it.

    `faults` fall into stretches of the token budget, and training waits for whoever is not back in
    time; `outages` come by the clock, and nothing waits. One of them is empty.

    `tokens_per_fault`: trained tokens of all learners in a stretch of the schedule; the budget of
    `spec` is set from it, unless `tokens` is given. `compare`: the same run is done first with no
    faults, at the same budget. `is_calm`: nothing of all that happens. `mtbf_s`, `repair_s`: what
    the outages were drawn with, where they were; the first `scripted` of them were not.
    `restart_s`, `link`: see `Units`. `image`: all of it runs in containers of
    that image; None for processes of this machine.
    """

    out: Path
    spec: RunSpec
    faults: Faults
    seed: int = 0
    learners: int = 3
    pace_s: float = 0.1
    tokens_per_fault: int = 46_000
    snapshot_rounds: int = 12
    data: str | None = None
    compare: bool = False
    is_calm: bool = False
    wall_limit_s: float = 7200.0
    outages: tuple[Outage, ...] = ()
    scripted: int = 0
    tokens: int | None = None
    checkpoint_every_s: float | None = None
    mtbf_s: float | None = None
    repair_s: float | None = None
    restart_s: float | None = None
    link: LinkShape = CLEAR
    image: str | None = None

    @property
    def storms(self) -> tuple[Outage, ...]:
        """The outages that come."""
        return () if self.is_calm else self.outages

    @property
    def has_traps(self) -> bool:
        """Whether the server must be one that can be broken from within."""
        fills = any(outage.what is OutageKind.DISK_FULL for outage in self.storms)
        return fills or (self.faults.point_kills > 0 and not self.is_calm)

    @property
    def schedule(self) -> Schedule:
        """What happens when."""
        return make_schedule(Faults() if self.is_calm else self.faults, self.seed)

    @property
    def budget_tokens(self) -> int:
        """Of the run."""
        return self.tokens or round(stretches(self.faults) * self.tokens_per_fault)

    @property
    def islands(self) -> tuple[Island, ...]:
        """All equally fast."""
        return make_islands(self.learners, self.pace_s, 1.0)


@dataclass(frozen=True, slots=True)
class Places:
    """Where what is in `out`."""

    out: Path

    @property
    def stamps(self) -> Path:
        """Of all processes."""
        return self.out / "stamps"

    @property
    def trap(self) -> Path:
        """Of the server."""
        return self.out / "trap.json"

    @property
    def full(self) -> Path:
        """Fills the server's disk while it is there."""
        return self.out / "disk.full"

    @property
    def judgement(self) -> Path:
        """What the referee has written."""
        return self.out / "judgement.json"

    def receipts(self, learner: str) -> Path:
        """Those of a learner."""
        return self.out / "receipts" / f"{learner}.jsonl"

    @property
    def result(self) -> Path:
        """What it all came to."""
        return self.out / "chaos.json"

    @property
    def report(self) -> Path:
        """The same, to be read."""
        return self.out / "chaos.md"

    @property
    def timeline(self) -> Path:
        """The same, to be looked at."""
        return self.out / "timeline.png"
