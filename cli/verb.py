"""What a verb of the command is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cli.keys import VerbSettings


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: `name` may be two words ("bench pace").

    `run` takes an instance of `settings`. It returns when the work is done or was stopped cleanly,
    and raises a `DilocoError` for whatever a person should read. `details` is what --help says
    above the flags, `examples` what it says below them.
    """

    name: str
    summary: str
    details: str
    examples: str
    settings: type[VerbSettings]
    run: Callable[[Any], None]

    @property
    def prefix(self) -> str:
        """The verb's part of an environment variable's name: `BENCH_PACE`."""
        return self.name.replace(" ", "_").upper()
