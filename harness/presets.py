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
            sync_interval=(
                IntervalStage(from_share=0.0, steps=8),
                IntervalStage(from_share=0.25, steps=24),
            ),
            outer=OuterSettings(learning_rate=0.5, momentum=0.8),
        ),
        pace_s=0.22,
    ),
}


def preset(name: str) -> Preset:
    """The preset of that name; SettingsError, naming those that exist, for another."""
    if name not in PRESETS:
        raise SettingsError(f"there is no preset {name}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]
