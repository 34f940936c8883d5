"""`diloco bench faults`: three ways to train under one schedule, and what is concluded from it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from cli.verbs.bench_faults import BenchFaultsSettings, plan_of
from fragments.errors import SettingsError
from fragments.runspec import ProgramSettings
from harness.chaos.judgement import DataFound
from harness.chaos.outages import Outage, OutageKind
from harness.chaos.result import ChaosResult, Models, Spent, Spread
from harness.chaos.site import JOIN_S, Units
from harness.chaos.steps import Steps, build, stamped
from harness.cluster import Look
from harness.dataparallel.lives import JobResult
from harness.environment import child_environment, command
from harness.fault_rates.plan import WAYS
from harness.fault_rates.plot import draw
from harness.fault_rates.report import report
from harness.fault_rates.result import FaultRatesResult, RateRun, falls_short
from harness.link import LinkShape
from harness.plan import names_of
from harness.processes import Command, Supervisor
from learner.program import Shard

NONE = Spread(median=None, max=None, count=0)


def test_all_runs_of_a_schedule_differ_in_nothing_but_how_they_train(tmp_path: Path) -> None:
    plan = plan_of(BenchFaultsSettings(mtbf_s="90, 30", seeds=2, seed=3), tmp_path)
    assert plan.schedules == [(90.0, 3), (90.0, 4), (30.0, 3), (30.0, 4)]
    assert plan.num_runs == 13
    calm, ours = plan.undisturbed(), plan.decoupled(30.0, 3)
    assert calm.outages == ()
    assert {each.what for each in ours.outages} == {OutageKind.KILL}
    assert len(ours.outages) > 2 * len(plan.decoupled(90.0, 3).outages)
    assert ours.outages != plan.decoupled(30.0, 4).outages
    same = replace(ours, out=calm.out, outages=(), mtbf_s=None, repair_s=None)
    assert same == calm

    beside = plan.synchronous(30.0, 3)
    assert replace(beside, out=ours.out, spec=ours.spec) == ours
    assert (beside.spec.quorum, beside.spec.fragments) == (4, 1)
    assert beside.spec.adoption.max_overlap_steps == 0
    kept = ("program", "outer", "codec", "sync_interval", "lease_ttl_s", "seed")
    assert all(getattr(beside.spec, name) == getattr(ours.spec, name) for name in kept)

    job, kills = plan.data_parallel(30.0, 3)
    assert [(k.at_s, k.learner) for k in kills] == [(o.at_s, o.whom) for o in ours.outages]
    assert list(job.sites) == names_of(ours.islands)
    assert (job.spec.program, job.data, job.pace_s) == (ours.spec.program, ours.data, 0.25)
    assert job.checkpoint_every_steps * job.pace_s == ours.checkpoint_every_s
    assert len({job.out, ours.out, beside.out, calm.out}) == 4
    thin = plan_of(BenchFaultsSettings(mtbf_s="30", rate_mbit=2), tmp_path)
    for each in (thin.undisturbed(), thin.decoupled(30.0, 1), thin.synchronous(30.0, 1)):
        assert each.link == LinkShape(rate_mbit=2)
    far = plan_of(BenchFaultsSettings(mtbf_s="30", rate_mbit=2, delay_ms=40), tmp_path)
    assert far.decoupled(30.0, 1).link == LinkShape(rate_mbit=2, delay_s=0.04)
    with pytest.raises(SettingsError, match="--delay-ms: give --rate-mbit too"):
        plan_of(BenchFaultsSettings(delay_ms=40), tmp_path)


def test_how_long_it_takes_is_told_before(tmp_path: Path) -> None:
    plan = plan_of(BenchFaultsSettings(), tmp_path)
    assert 20 * 60 < plan.expected_s < 60 * 60
    assert replace(plan, seeds=2).expected_s > 1.5 * plan.expected_s
    for text in ("", "often", "30,-1", "nan"):
        with pytest.raises(SettingsError, match="give seconds"):
            plan_of(BenchFaultsSettings(mtbf_s=text), tmp_path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": 10}, "--tokens 10: a run of 0.00244 s is over before a learner"),
        ({"tokens": 80_000}, "a run of 19.5 s is over before a learner"),
        ({"learners": 1}, "--learners 1: with nobody beside it"),
        ({"mtbf_s": "30,80,30"}, "--mtbf-s: 30 is there twice"),
        ({"mtbf_s": "2"}, "--mtbf-s 2: so often that by the paper's rule nothing is kept"),
    ],
)
def test_what_nothing_could_be_concluded_from_is_refused(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError) as refusal:
        plan_of(BenchFaultsSettings(**given), tmp_path)
    assert said in str(refusal.value)


@pytest.mark.timeout(240)
def test_a_stop_keeps_the_runs_that_have_finished(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = ("--learners", "2", "--tokens", "8000", "--pace-s", "0.25", "--mtbf-s", "30")
    words = ("--out", str(out), *run, "--repair-s", "1", "--restart-s", "0")
    process = subprocess.Popen(
        command("bench", "faults", *words), env=child_environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("run 2 of 4"):
                process.send_signal(signal.SIGINT)
                break
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130, "".join(said) + error
    assert error.endswith("diloco: stopped before it was done\n")
    result = FaultRatesResult.model_validate_json((out / "faults.json").read_text("utf-8"))
    assert result.undisturbed.goodput > 0
    assert result.runs == ()
    assert [each.rpartition(": ")[2] for each in result.missing] == [way for way, _ in WAYS]
    told = (out / "faults.md").read_text("utf-8")
    assert told.strip() == report(result)
    assert told.startswith("# Faults: no schedule has finished\n")
    assert "Missing:\n\n- a kill every 30 s of a learner, seed 1: Decoupled DiLoCo\n" in told


def test_a_learner_that_is_back_too_soon_waits_outside_and_then_before_its_step(
    tmp_path: Path,
) -> None:
    pid, steps = os.getpid(), Steps(tmp_path)
    inner = ProgramSettings(factory="tests.harness.factory:build")
    settings = stamped(inner, tmp_path).settings
    built, stepped = threading.Event(), threading.Event()
    steps.hold_back({pid}, {pid})

    def learn() -> None:
        program: Any = build(settings, None, 0)
        built.set()
        params = program.init_params(0)
        batch, none = program.batch(Shard(0, 1), 0), program.init_inner(params)
        for _ in ("the warm-up", "the step"):
            program.step(params, none, batch, jnp.float32(0))
        stepped.set()

    thread = threading.Thread(target=learn)
    thread.start()
    assert not built.wait(0.3)
    steps.hold_back(set(), {pid})
    assert built.wait(60)
    assert not stepped.wait(0.5)
    assert steps.times(pid) == []
    steps.hold(set())
    steps.hold_back(set(), set())
    assert stepped.wait(60)
    thread.join()
    assert len(steps.times(pid)) == 1
    assert steps.count(pid) == 2


def test_a_restart_takes_what_it_is_to_take_however_soon_the_process_is_there(
    tmp_path: Path,
) -> None:
    now_s = 0.0
    command = Command("eu", ("sleep", "600"), tmp_path / "log", dict(os.environ), max_restarts=9)
    with Supervisor(clock=lambda: now_s) as processes:
        processes.start(command)
        steps = Steps(tmp_path)
        site = Units(processes, {}, steps, {"eu": 0.5}, tmp_path / "full", restart_s=12.0)
        kill = Outage(what=OutageKind.KILL, whom="eu", at_s=0, for_s=10)
        dead = processes.pids()["eu"]
        assert site.begin(kill)

        def is_back() -> bool:
            nonlocal now_s
            now_s = min(now_s + 0.1, 5.0)  # It is not yet repaired, when the process is there.
            return processes.pids().get("eu", dead) != dead

        Look(processes, threading.Event(), tmp_path, site.tick).until(is_back, 60, "the process")
        site.tick()
        pid = processes.pids()["eu"]
        door, gate = tmp_path / "doors" / f"{pid}.shut", tmp_path / f"{pid}.shut"
        seen = []
        for at_s in (10.0, 22.4 - JOIN_S, 22.6 - JOIN_S, 22.4, 22.6):
            now_s = at_s
            site.tick()
            seen.append((door.exists(), gate.exists()))
    held, inside, free = (True, True), (False, True), (False, False)
    assert seen == [held, held, inside, inside, free]


def _chaos(goodput: float, **given: Any) -> ChaosResult:
    """Of a run with four kills, where nothing is said of it."""
    counts = dict.fromkeys(
        (
            "seed", "server_kills", "learner_stops", "acknowledged", "acknowledged_lost",
            "applied_twice", "digest_mismatches", "voided", "versions", "events", "snapshots",
            "starts", "epochs", "leases_lapsed", "bytes_up", "bytes_down", "held_s",
            "tokens_per_s", "tokens_merged",
        ),
        0,
    )  # fmt: skip
    values: dict[str, Any] = {
        **counts,
        "learner_kills": 4,
        "kills_by_point": {},
        "data": DataFound(fragments=1, merged=0, gaps={}, overlaps=0, miscounts=0),
        "fates": {},
        "learners": 4,
        "pace_s": 0.25,
        "mtbf_s": None,
        "repair_s": 10.0,
        "outages": (),
        "by_kind": {},
        "spent": Spent(
            merged=goodput, down=0.05, returning=0.04, slowed=0.0, unmerged={"crash": 0.02},
            slower=round(0.89 - goodput, 4),
        ),
        "models": Models(restart_s=12.0, checkpoint_s=10.0, data_parallel=0.5, papers_rule=0.84),
        "recovery_s": NONE,
        "learner_recovery_s": NONE,
        "away": None,
        "goodput": goodput,
        "uptime": 1.0,
        "tokens_trained": 500_000,
        "loss_first": 8.0,
        "loss": 2.6,
        "loss_unit": "bits per byte",
        "loss_undisturbed": 2.61,
        "loss_gap": -0.004,
        "wall_s": 150.0,
        "findings": (),
        "holds": True,
    }  # fmt: skip
    return ChaosResult(**(values | given))


def _run(mtbf_s: float, job: float, ours: float, seed: int = 0, **given: Any) -> RateRun:
    parallel = JobResult(
        kills=4, starts=5, steps_useful=0, steps_made=0, span_s=150.0, goodput=job, uptime=job,
        down=0.2, returning=0.1, made_again=0.05, slower=round(0.65 - job, 4), late_s=NONE,
    )  # fmt: skip
    return RateRun(
        mtbf_s=mtbf_s,
        seed=seed,
        data_parallel=parallel,
        synchronous=_chaos(0.7, late_s=Spread(median=1.0, max=1.5, count=2)),
        decoupled=_chaos(ours, **given),
    )


def test_the_rate_where_data_parallel_keeps_its_share_is_judged() -> None:
    calm = _chaos(0.98, learner_kills=0)
    mild, often = _run(400, 0.9, 0.6), _run(60, 0.1, 0.3)
    assert list(falls_short(calm, [mild, _run(130, 0.56, 0.85), often])) == []
    (short,) = falls_short(calm, [mild, _run(130, 0.56, 0.83), often])
    assert short == "at an MTBF of 130 s 83.0% are kept, not 84.0%"
    asleep = _run(130, 0.56, 0.85, uptime=0.99)
    assert list(falls_short(calm, [asleep])) == ["at an MTBF of 130 s the uptime is 99.0%"]
    easy = Models(restart_s=12.0, checkpoint_s=10.0, data_parallel=0.5, papers_rule=0.6)
    (short,) = falls_short(calm, [_run(130, 0.56, 0.7, models=easy)])
    assert short == "at an MTBF of 130 s 70.0% are kept, not 80.0%"
    # Over thin links it keeps what they leave, and the rule alone is the bound.
    assert list(falls_short(calm, [_run(180, 0.2, 0.7, models=easy)], is_thin=True)) == []
    # Where there is no such rate the rule alone is the bound, and that is said.
    (short,) = falls_short(calm, [_run(60, 0.4, 0.7, models=easy)])
    assert "keeps 40.0% at an MTBF of 60 s" in short
    assert "longer" in short
    (short, _) = falls_short(calm, [_run(60, 0.4, 0.7, models=easy)], ["a run", "a run"])
    assert short == "2 runs are missing, so this is no judgement of all"
    unharmed = _run(900, 0.56, 0.9, learner_kills=0)
    assert list(falls_short(calm, [unharmed])) == [
        "at an MTBF of 900 s nobody was killed before the runs were over, so nothing is judged"
    ]
    worse = _run(130, 0.56, 0.85, findings=("the loss is 2.00% above that without faults",))
    assert "at an MTBF of 130 s: the loss" in next(iter(falls_short(calm, [worse])))


def test_the_report_has_means_over_schedules_and_where_the_time_went(tmp_path: Path) -> None:
    runs = (_run(400, 0.9, 0.95), _run(130, 0.5, 0.8, 0), _run(130, 0.64, 0.9, 1))
    result = FaultRatesResult(
        undisturbed=_chaos(0.98),
        runs=runs,
        repair_s=10.0,
        restart_s=12.0,
        checkpoint_s=10.0,
        falls_short=("this",),
    )
    assert FaultRatesResult.model_validate_json(result.model_dump_json()) == result
    told = report(result)
    kept = "57.0 ± 9.9% | 70.0 ± 0.0% | **85.0 ± 7.1%** | 84.0 ± 0.0% | 86.7 ± 7.2%"
    assert f"| 130 s (judged) | 4 | {kept} |" in told
    assert "| 400 s | 4 | 90.0% | 70.0% | **95.0%** | 84.0% | 96.9% |" in told
    assert "where the time went, MTBF 130 s" in told
    assert "| steps made again after a restart | 5.0% | - | - |" in told
    assert "| steps not merged: crash | - | 2.0% | 2.0% |" in told
    assert "synchronous 6, by at most 1.5 s" in told
    assert "- this" in told
    assert "Missing" not in told
    part = report(result.model_copy(update={"missing": ("that run",)}))
    assert "Missing:\n\n- that run\n\nFalls short:\n\n- this" in part
    assert "over loopback" in told
    thin = result.model_copy(update={"rate_mbit": 2.0})
    assert report(thin).startswith("# Faults at 2 rates over links of 2 Mbit/s\n")
    far = report(thin.model_copy(update={"delay_ms": 40.0, "delayed_by": "a process of ours"}))
    assert "its delay itself; that between workers is made by a process of ours." in far
    assert "55 to 60% is not asked for here" in far
    assert "not asked for" not in told
    assert far.startswith("# Faults at 2 rates over links of 2 Mbit/s and 40 ms\n")
    assert "behind a link of 2 Mbit/s each way and 40 ms one way: a relay" in far
    draw(thin, tmp_path / "faults.png")
    assert (tmp_path / "faults.png").read_bytes().startswith(b"\x89PNG")
