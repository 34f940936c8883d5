"""Runs that are worth having by name."""

from __future__ import annotations

from dataclasses import dataclass

from fragments.errors import SettingsError
from fragments.runspec import OuterSettings, RunSpec


@dataclass(frozen=True, slots=True)
class Preset:
    """A run, how fast its fast learners are paced (seconds a step), and what share of it the first
    learner trains alone.
    """

    spec: RunSpec
    pace_s: float
    lead_share: float


PRESETS = {
    "demo": Preset(
        # Two fast learners at 0.22 s a step and one three times slower make about 10.9 steps a
        # second together; a step is 1024 bytes. So this is a run of about 90 seconds.
        spec=RunSpec(
            budget_tokens=960_000,
            fragments=4,
            # Of what the study tried in this run, on one seed (docs/results/demo.md): a constant
            # H of 12 ends where one that begins with 4 does, before 24 and 4; a high momentum does
            # not pay back in its 27 rounds a fragment.
            sync_interval=12,  # type: ignore[arg-type]  # a plain H; the model parses it
            outer=OuterSettings(learning_rate=0.7, momentum=0.3),
        ),
        pace_s=0.22,
        # On the same seed the only thing that ends below data-parallel training; the others take a
        # while to start, so that they come in after a tenth.
        lead_share=0.06,
    ),
}


def preset(name: str) -> Preset:
    """The preset of that name; SettingsError, naming those that exist, for another."""
    if name not in PRESETS:
        raise SettingsError(f"there is no preset {name}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]
