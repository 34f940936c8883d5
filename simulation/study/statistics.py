"""Means, spreads and intervals of a few seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5% quantiles of Student's t with 1 to 30 degrees of freedom (any table of them)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds. `half_width`: of its 95% t-interval, None for a single seed."""

    mean: float
    half_width: float | None
    count: int


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; `values` must not be empty."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1); 0 for a single value, not finite if a value is not."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def t_quantile(degrees: int) -> float:
    """97.5% quantile of Student's t; beyond 30 degrees that of 30, which is a little wide."""
    return _T_975[min(degrees, len(_T_975)) - 1]


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95% interval: mean +- t(n - 1) * s / sqrt(n)."""
    count = len(values)
    if count < 2:
        return Estimate(mean(values), None, count)
    half = t_quantile(count - 1) * deviation(values) / math.sqrt(count)
    return Estimate(mean(values), half, count)
