from __future__ import annotations

import math

import pytest

from simulation.study.statistics import deviation, estimate, mean, t_quantile


def test_the_interval_is_the_one_computed_by_hand() -> None:
    # 1, 2, 3, 4: mean 2.5, s = sqrt(5/3) = 1.290994, s/sqrt(4) = .645497, t(3) = 3.182.
    found = estimate([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.half_width == pytest.approx(3.182 * 0.645497, rel=1e-6)
    assert found.count == 4


def test_one_seed_has_no_interval_and_equal_values_one_of_zero() -> None:
    assert estimate([7.0]).half_width is None
    assert estimate([7.0, 7.0, 7.0]).half_width == 0.0


def test_means_and_spreads() -> None:
    assert mean([0.1] * 10) == 0.1
    assert deviation([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == pytest.approx(
        math.sqrt(32 / 7), rel=1e-12
    )
    assert deviation([3.0]) == 0.0


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (4, 2.776), (30, 2.042)])
def test_quantiles_are_students(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == quantile
    assert t_quantile(200) == t_quantile(30)
