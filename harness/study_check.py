"""Makes a recorded cell of a study again, and says whether it came out as recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fragments.errors import DilocoError
from harness.study_process import CACHE, Worker
from simulation.study.store import Store

LOSS_TOLERANCE = 0.01
"""Share of the recorded loss by which the same recipe may end elsewhere on another instruction
set. Other roundings alone move it by less: `decoupled_equal` seed 0 ends 0.39% lower with
XLA_FLAGS=--xla_cpu_max_isa=AVX.
"""


@dataclass(frozen=True, slots=True)
class Check:
    """A recorded cell made again. `isa` is this machine's: on another one bits may differ."""

    study: str
    row: str
    seed: int
    digest_equal: bool
    loss: float
    loss_recorded: float
    isa: str
    isa_recorded: str
    wall_s: float

    @property
    def fault(self) -> str | None:
        """What is wrong, as a sentence; None where it is as recorded.

        With the recorded instruction set weights and loss are the same to the bit. With another,
        whose compiled code may round differently, the loss is within `LOSS_TOLERANCE` of that.
        """
        if self.isa == self.isa_recorded:
            if not self.digest_equal:
                return "the weights differ from those recorded on such a processor"
            if _is_near(self.loss, self.loss_recorded, 0.0):
                return None
            return "the weights are those recorded, but their loss is another"
        if _is_near(self.loss, self.loss_recorded, LOSS_TOLERANCE):
            return None
        return (
            f"the loss differs from the recorded one by more than {100 * LOSS_TOLERANCE:g}%, which"
            f" other roundings ({self.isa}; recorded with {self.isa_recorded}) do not explain"
        )


def _is_near(loss: float, recorded: float, tolerance: float) -> bool:
    """Within a share of the recorded; of a run that diverged, whether this one did."""
    if not (math.isfinite(loss) and math.isfinite(recorded)):
        return math.isfinite(loss) == math.isfinite(recorded)
    return abs(loss - recorded) <= tolerance * abs(recorded)


def check_cell(
    row: str, seed: int, out: Path, study: str | None = None, cache: Path = CACHE
) -> Check:
    """Makes a recorded cell again and compares.

    Raises:
        SettingsError: when there is no such cell.
        DilocoError: when it cannot be made again.
    """
    cell = Store(out / "cells").find(row, seed, study)
    with Worker(cache) as worker:
        answer = worker.run(cell.recipe)
        if answer.result is None:
            raise DilocoError(f"row {row} seed {seed} cannot be made again: {answer.refusal}")
        return Check(
            study=cell.study,
            row=row,
            seed=seed,
            digest_equal=answer.result.digest == cell.result.digest,
            loss=answer.result.loss,
            loss_recorded=cell.result.loss,
            isa=worker.hello.isa,
            isa_recorded=cell.isa,
            wall_s=answer.wall_s,
        )
