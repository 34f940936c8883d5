"""What a bench of thin links measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fragments.errors import SettingsError
from fragments.runspec import RunSpec
from harness.regions import SLOWEST_MBIT

RATES_MBIT = (1000.0, 100.0, 50.0, 20.0, 10.0, 5.0)
FASTEST_MBIT = 10_000.0
PACE_S = 0.09
START_LIMIT_S = 180.0
SETTLE_S = 3.0
"""After a change of rate, before a window: some laps over all fragments."""

WARM_STEPS = 20
_SLACK = 3
"""The budget is that of so many times the steps that the plan foresees: the bench never gets there,
and the learning rate is that of a run's first third."""

PROGRAM = {"width": 192, "depth": 3, "heads": 6, "seq_len": 32, "batch_size": 1}
"""1.43 million parameters, and so few tokens a step that a core computes it in a fifth of the pace:
the pace stands for hardware on which they are more."""


@dataclass(frozen=True, slots=True)
class ThinPlan:
    """What to measure: `learners` sites and the server's, all with the same link.

    `rates_mbit` go from the widest to the thinnest. `delay_ms`: from any site to any other, one
    way. `pace_s` is the time that a step's computing is
    given, by both. A window lasts `window_s`, and at least `least_steps` of data-parallel training.

    Raises:
        SettingsError: for fewer than two rates, or rates that do not fall or cannot be.
    """

    out: Path
    learners: int = 2
    rates_mbit: tuple[float, ...] = RATES_MBIT
    delay_ms: float = 0.0
    pace_s: float = PACE_S
    sync_interval: int = 24
    fragments: int = 8
    window_s: float = 20.0
    least_steps: int = 4
    program: dict[str, Any] = field(default_factory=lambda: dict(PROGRAM))

    def __post_init__(self) -> None:
        rates = list(self.rates_mbit)
        if len(rates) < 2 or sorted(set(rates), reverse=True) != rates:
            raise SettingsError("--rates-mbit must fall, from the widest link to the thinnest")
        if not all(SLOWEST_MBIT <= rate <= FASTEST_MBIT for rate in rates):
            raise SettingsError(
                f"--rates-mbit must lie between {SLOWEST_MBIT:g} and {FASTEST_MBIT:g} Mbit/s"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The learners', which are those of their sites."""
        return tuple(f"site-{number + 1}" for number in range(self.learners))

    @property
    def tokens_per_step(self) -> int:
        """Of one learner."""
        return int(self.program["seq_len"]) * int(self.program["batch_size"])

    @property
    def spec(self) -> RunSpec:
        """The run that both train."""
        seconds = len(self.rates_mbit) * (self.window_s + SETTLE_S) + START_LIMIT_S
        steps = _SLACK * self.learners * seconds / self.pace_s
        return RunSpec.model_validate(
            {
                "budget_tokens": round(steps * self.tokens_per_step),
                "fragments": self.fragments,
                "sync_interval": self.sync_interval,
                "max_learners": self.learners,
                "program": {"settings": self.program},
            }
        )
