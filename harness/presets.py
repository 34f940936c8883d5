"""Runs that are worth having by name."""

from __future__ import annotations

from dataclasses import dataclass

from fragments.errors import SettingsError
from fragments.runspec import IntervalStage, OuterSettings, RunSpec


@dataclass(frozen=True, slots=True)
class Preset:
    """A run, and how fast its fast learners are paced (seconds a step)."""

    spec: RunSpec
    pace_s: float


PRESETS = {
    "demo": Preset(
        # Two fast learners at 0.22 s a step and one three times slower make about 10.9 steps a
        # second together; a step is 1024 bytes. So this is a run of about 90 seconds.
        spec=RunSpec(
            budget_tokens=960_000,
            fragments=4,
            # About 40 rounds a fragment from random weights. The outer step is one rehearsal's
            # (2.60 bits per byte; .5/.8 ended at 2.85), no study's: those of the outer step begin
            # warm, and there .5/.8 is the best at 25 and 50 rounds, or level with it.
            sync_interval=(
                IntervalStage(from_share=0.0, steps=4),
                IntervalStage(from_share=0.1, steps=12),
            ),
            outer=OuterSettings(learning_rate=0.7, momentum=0.3),
        ),
        pace_s=0.22,
    ),
}


def preset(name: str) -> Preset:
    """The preset of that name; SettingsError, naming those that exist, for another."""
    if name not in PRESETS:
        raise SettingsError(f"there is no preset {name}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]
