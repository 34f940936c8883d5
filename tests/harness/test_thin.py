"""`diloco bench links`: what it concludes, and a tiny one from end to end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fragments.errors import SettingsError
from harness.environment import child_environment, command
from harness.sites import DELAYED_BY
from harness.thin.plan import ThinPlan
from harness.thin.report import report
from harness.thin.result import (
    DataParallelPoint,
    DecoupledPoint,
    ThinResult,
    claimed,
    hidden_gain,
    holds,
    mean_rate,
)
from tests.support.sites import require_sites

PACE_S = 0.1


def _parallel(rate_mbit: float, step_s: float) -> DataParallelPoint:
    return DataParallelPoint(
        rate_mbit=rate_mbit,
        steps=10,
        step_s=step_s,
        tokens_per_s=64 / step_s,
        utilisation=PACE_S / step_s,
        step_bytes=2e6,
        cores_busy=0.5,
    )


def _decoupled(rate_mbit: float, step_s: float, on_schedule: float = 1.0) -> DecoupledPoint:
    return DecoupledPoint(
        rate_mbit=rate_mbit,
        steps=100,
        step_s=step_s,
        tokens_per_s=64 / step_s,
        utilisation=PACE_S / step_s,
        on_schedule=on_schedule,
        merged_share=0.8,
        learner_mbit=1.0,
        server_mbit=2.0,
        cores_busy=0.5,
    )


PARALLEL = [_parallel(1000, 0.18), _parallel(10, 4.0), _parallel(5, 8.0)]


def test_the_claim_is_that_of_the_thinnest_link_that_carries_the_rounds() -> None:
    ours = [_decoupled(1000, 0.1), _decoupled(10, 0.1), _decoupled(5, 0.1, on_schedule=0.7)]
    claim = claimed(PARALLEL, ours, PACE_S)
    assert claim is not None
    assert claim.rate_mbit == 10
    assert claim.ratio == 40
    assert claim.ratio_merged == 32
    # An exchange of 3.9 s that computing of 0.1 s hides in part.
    assert claim.ratio_hidden == 39
    assert holds(claim)


def test_a_learner_that_slows_down_does_not_keep_its_utilisation() -> None:
    ours = [_decoupled(1000, 0.1), _decoupled(10, 0.12), _decoupled(5, 0.2)]
    claim = claimed(PARALLEL, ours, PACE_S)
    assert claim is not None
    assert claim.rate_mbit == 1000
    assert not holds(claim)


def test_nothing_is_claimed_against_data_parallel_at_a_batch_that_does_not_suit_it() -> None:
    ours = [_decoupled(1000, 0.1), _decoupled(10, 0.1)]
    claim = claimed([_parallel(1000, 0.25), _parallel(10, 4.0)], ours, PACE_S)
    assert claim is not None
    assert claim.ratio == 40
    assert not holds(claim)


def test_hiding_an_exchange_gains_at_most_twice() -> None:
    assert hidden_gain(0.2, 0.1) == pytest.approx(2.0)
    assert hidden_gain(0.1, 0.1) == pytest.approx(1.0)
    assert hidden_gain(10.0, 0.1) == pytest.approx(10 / 9.9)


def test_a_rate_counts_whole_steps_within_the_window() -> None:
    assert mean_rate([[0.0, 1.0, 1.5, 2.0, 9.0], [1.0, 2.0]], 0.9, 3.0) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="too few steps"):
        mean_rate([[0.0, 9.0]], 1.0, 8.0)


def _result(parallel: list[DataParallelPoint], ours: list[DecoupledPoint]) -> ThinResult:
    claim = claimed(parallel, ours, PACE_S)
    return ThinResult(
        learners=2, parameters=1_000_000, tokens_per_step=32, pace_s=PACE_S,
        sync_interval_steps=24, fragments=8, codec="int8", window_s=20,
        data_parallel=tuple(parallel), decoupled=tuple(ours), claim=claim, holds=holds(claim),
    )  # fmt: skip


def test_the_heading_says_what_was_met_and_what_was_missed() -> None:
    ours = [_decoupled(1000, 0.1), _decoupled(10, 0.1)]
    wide, slow, thin = _parallel(1000, 0.18), _parallel(1000, 0.25), _parallel(10, 4.0)
    headings = [
        report(_result(*both)).splitlines()[0]
        for both in (
            ([wide, thin], ours),
            ([slow, thin], ours),
            ([wide, _parallel(10, 1.99)], ours),
            ([slow, _parallel(10, 1.0)], ours),
            ([wide, thin], [_decoupled(1000, 0.1, 0.5), _decoupled(10, 0.1, 0.5)]),
        )
    ]
    fast, used = "times the tokens a second at 10 Mbit/s", "utilised on the widest link"
    claim, share = "# Thin links: the claim", "data-parallel"
    assert headings == [
        f"{claim} holds: 40.0 {fast} and {share} 55.6% {used}",
        f"{claim} fails: missed {share} 40.0% {used} (not 50%); met 40.0 {fast}",
        f"{claim} fails: missed 19.9 {fast} (not 20); met {share} 55.6% {used}",
        f"{claim} fails: missed 10.0 {fast} (not 20) and {share} 40.0% {used} (not 50%)",
        f"{claim} fails: on no link does Decoupled keep its utilisation and its schedule",
    ]


@pytest.mark.parametrize("rates", [(10.0,), (10.0, 100.0), (10.0, 10.0), (10.0, 0.01)])
def test_rates_that_make_no_curve_are_refused(tmp_path: Path, rates: tuple[float, ...]) -> None:
    with pytest.raises(SettingsError, match="--rates-mbit must"):
        ThinPlan(tmp_path, rates_mbit=rates)


@pytest.mark.timeout(240)
def test_a_tiny_bench_from_end_to_end(tmp_path: Path) -> None:
    require_sites()
    out = tmp_path / "out"
    model = ("width=16", "depth=1", "heads=2", "seq_len=16", "batch_size=1")
    words = ("--rates-mbit", "100", "1", "--window-s", "2", "--pace-s", "0.1", "--fragments", "2")
    program = [word for one in model for word in ("--program", one)]
    argv = command("bench", "links", "--out", str(out), *words, "--delay-ms", "40", *program)
    done = subprocess.run(argv, env=child_environment(), capture_output=True, text=True)
    # So small a model says nothing about the claim.
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    result = ThinResult.model_validate_json((out / "links.json").read_text("utf-8"))
    assert [point.rate_mbit for point in result.data_parallel] == [100, 1]
    wide, thin = result.data_parallel
    assert "any two are 40 ms apart" in done.stdout
    assert f"made by {DELAYED_BY}" in done.stdout
    assert result.delayed_by == DELAYED_BY
    assert result.round_trip_ms is not None
    assert 2 * 40 <= result.round_trip_ms < 6 * 40
    # A ring of two sends at least twice, and waits for what it sends.
    assert wide.step_s > result.pace_s + 2 * 0.040
    # A ring of two has two bytes a value each way, and little more. Its exchange takes what these
    # need at 1 Mbit/s, but for what a bucket saves while it computes.
    assert 2 * result.parameters < thin.step_bytes < 1.5 * 2 * result.parameters
    assert thin.step_s > result.pace_s + 0.5 * 2 * 8 * result.parameters / 1e6
    assert thin.tokens_per_s < wide.tokens_per_s
    assert all(point.steps > 0 and point.server_mbit > 0 for point in result.decoupled)
    assert result.decoupled[1].step_s < thin.step_s
    assert (out / "links.md").read_text("utf-8").strip() == report(result).strip()
    assert done.stdout.strip() == report(result).strip()
    assert (out / "links.png").read_bytes().startswith(b"\x89PNG")
