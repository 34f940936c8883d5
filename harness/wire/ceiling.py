"""What a stage does at most, and how that is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

_AT_LEAST_S = 0.4
_MOST_TIMES = 40
_LEAST_TIMES = 3


class Ceiling(BaseModel):
    """What one stage does at most, with nothing beside it: medians over repetitions."""

    model_config = ConfigDict(frozen=True)

    fp32_gb_per_s: float
    cpu_s_per_gb: float


def measured(work: Callable[[], float | None], fp32_bytes: int) -> Ceiling:
    """Times `work`, which handles so many bytes of float32 parameters and returns when they are
    through; what it returns are processor seconds that it took in other processes.

    The first time is left out: it compiles.
    """
    work()
    walls_s: list[float] = []
    cpus_s: list[float] = []
    while len(walls_s) < _LEAST_TIMES or (
        sum(walls_s) < _AT_LEAST_S and len(walls_s) < _MOST_TIMES
    ):
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        elsewhere_s = work() or 0.0
        walls_s.append(time.perf_counter() - began_s)
        cpus_s.append(time.process_time() - cpu_began_s + elsewhere_s)
    gb = fp32_bytes / 1e9
    return Ceiling(
        fp32_gb_per_s=round(gb / statistics.median(walls_s), 4),
        cpu_s_per_gb=round(statistics.median(cpus_s) / gb, 4),
    )
