"""`diloco bench overhead`: its pieces, and a small one from end to end."""

from __future__ import annotations

import os
import threading
from math import comb
from pathlib import Path

import pytest

from fragments.errors import DilocoError
from fragments.runspec import ProgramSettings
from harness.gated import Gate
from harness.overhead import (
    OverheadBench,
    OverheadPlan,
    OverheadResult,
    mean_step_s,
    upper_of_median,
)
from harness.pace import endless
from harness.presets import preset


@pytest.mark.parametrize(("count", "place"), [(5, 5), (7, 7), (8, 7), (11, 9), (20, 15)])
def test_the_upper_bound_is_the_smallest_order_statistic_that_holds(count: int, place: int) -> None:
    """Places as in tables of the sign test."""
    value, confidence = upper_of_median([float(i) for i in range(count, 0, -1)], 0.95)
    assert value == place
    assert confidence == pytest.approx(sum(comb(count, k) for k in range(place)) / 2**count)
    assert confidence >= 0.95


def test_too_few_values_are_bounded_by_the_largest_with_less_confidence() -> None:
    assert upper_of_median([1.0, 3.0, 2.0], 0.95) == (3.0, 0.875)


def test_a_window_counts_whole_steps_within_it() -> None:
    stamps = [0.0, 1.0, 1.5, 2.0, 2.5, 9.0]
    assert mean_step_s(stamps, 0.9, 3.0) == 0.5
    with pytest.raises(DilocoError, match="too few steps"):
        mean_step_s(stamps, 2.2, 3.0)


def test_a_gate_holds_who_comes_until_it_is_opened(tmp_path: Path) -> None:
    gate = Gate(tmp_path, os.getpid())
    gate.wait()
    gate.shut()
    passed = threading.Event()

    def pass_through() -> None:
        Gate(tmp_path, os.getpid()).wait()
        gate.stamp()
        passed.set()

    thread = threading.Thread(target=pass_through)
    thread.start()
    assert not passed.wait(0.1)
    assert gate.stamps() == []
    gate.open()
    thread.join(10)
    assert len(gate.stamps()) == 1


@pytest.mark.timeout(300)
def test_two_processes_take_turns_on_one_core(tmp_path: Path) -> None:
    small = {"width": 16, "depth": 1, "heads": 1, "seq_len": 32, "eval_windows": 4}
    spec = endless(preset("demo").spec).model_copy(
        update={"program": ProgramSettings(settings=small)}
    )
    lines: list[str] = []
    cores = os.sched_getaffinity(0)
    plan = OverheadPlan(out=tmp_path, spec=spec, pairs=2, window_s=1.0)
    result = OverheadBench(plan, threading.Event(), lines.append).run()
    assert os.sched_getaffinity(0) == cores
    assert {result.learner_core, *result.other_cores} == cores
    assert result.learner_core not in result.other_cores
    assert [line[:11] for line in lines] == ["pair 1 of 2", "pair 2 of 2"]
    assert result.contributions_merged > 0
    assert (result.pairs, result.confidence) == (2, 0.75)
    assert result.ratio_upper == max(result.ratios)
    assert all(step_s > 0 for step_s in (*result.with_sync_s, *result.without_sync_s))
    assert result.within == (result.ratio_upper <= result.bound)
    assert OverheadResult.model_validate_json(result.model_dump_json()) == result
