"""A data-parallel job under kills: what is kept is counted once, and it goes on by itself."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fragments.runspec import RunSpec
from harness.chaos.outages import Downtime
from harness.dataparallel.job import DataParallelJob
from harness.dataparallel.killed import KilledJob
from harness.dataparallel.lives import Life, job_result, next_step_s

PACE_S = 0.05
EVERY = 10
ENOUGH = 60


def test_a_job_goes_on_when_the_last_that_is_down_has_had_its_restart() -> None:
    assert next_step_s([], 12.0) == 0.0
    assert next_step_s([(5.0, 10.0)], 12.0) == 27.0
    # A kill while it restarts prolongs that; one that is over sooner than an earlier one does not.
    assert next_step_s([(5.0, 10.0), (20.0, 10.0)], 12.0) == 42.0
    assert next_step_s([(5.0, 60.0), (20.0, 10.0)], 12.0) == 77.0


def test_steps_that_are_made_again_count_once_and_the_shares_sum_to_one() -> None:
    lives = [
        # Of 25 steps, 20 are in the checkpoint.
        Life(0, 0.0, 0.0, 0.0, 30.0, tuple(float(n) for n in range(1, 26))),
        # Killed again, 2 s after it was repaired.
        Life(20, 30.0, 40.0, None, 42.0, ()),
        Life(20, 42.0, 52.0, 60.0, 100.0, tuple(59.5 + n for n in range(1, 41))),
    ]
    found = job_result(lives, 2, 1.0, [0.7])
    assert (found.kills, found.starts, found.steps_made, found.steps_useful) == (2, 3, 65, 60)
    assert (found.span_s, found.goodput) == (100.0, 0.6)
    assert (found.down, found.returning, found.made_again) == (0.2, 0.1, 0.05)
    assert found.slower == pytest.approx(0.05)
    assert found.uptime == pytest.approx(0.65)
    assert (found.late_s.count, found.late_s.max) == (1, 0.7)
    # Killed once more before the end: what came after the checkpoint is gone.
    lives.append(Life(50, 100.0, 110.0, None, 105.0, ()))
    assert job_result(lives, 3, 1.0, []).steps_useful == 50


@pytest.mark.timeout(200)
def test_a_job_of_which_a_worker_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    spec = RunSpec.model_validate(
        {"budget_tokens": 3200, "program": {"factory": "tests.harness.factory:halved"}}
    )
    names = ("eu", "us")
    job = DataParallelJob(tmp_path, spec, names, PACE_S, checkpoint_every_steps=EVERY)
    kills = (Downtime(1.0, "us", 0.1), Downtime(900.0, "eu", 1.0))
    lines: list[str] = []
    run = KilledJob(job, kills, 150.0, 0.0, threading.Event(), lines.append, ENOUGH)
    found = run.run()
    assert (found.kills, found.starts) == (1, 2)
    assert "kill of us for 0.1 s" in lines[0]
    assert "the job goes on from step" in lines[1]
    # It was stopped at a tick, so there may be some steps more.
    assert ENOUGH <= found.steps_useful < ENOUGH + 2 * EVERY
    # It went back to a checkpoint by less than two of them: one may just have been due.
    assert found.steps_useful <= found.steps_made < found.steps_useful + 2 * EVERY
    assert job.saved_number >= ENOUGH - EVERY
    assert 0 < found.goodput < 1
    whole = found.goodput + found.down + found.returning + found.made_again + found.slower
    assert whole == pytest.approx(1, abs=0.001)
    # Processes that take seconds to start are late for a restart that is to take none.
    assert found.late_s.count == 1
