"""`diloco bench`: its pieces, the probe in a real process, and one tiny bench from end to end."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from fragments.errors import DilocoError, SettingsError
from harness.environment import child_environment, command, module
from harness.programs import load_program
from harness.wire.ceiling import Ceiling, measured
from harness.wire.plan import WirePlan, parse_params
from harness.wire.probe import ASK, Connection, ProbeReport
from harness.wire.processes import cpu_s, peak_bytes
from harness.wire.report import report_view
from harness.wire.result import WireResult, hottest, limit_gb_per_s, peak_ratio, stage_costs
from harness.wire.run import WireBench
from harness.wire.window import bulk_traffic, lasting_traffic
from learner.member import layout_of
from learner.program import Shard


@pytest.mark.parametrize(
    ("text", "params"),
    [("25M", 25_000_000), ("1e8", 10**8), ("1000", 1000), ("0.1G", 10**8), ("12k", 12_000)],
)
def test_numbers_of_parameters_are_read_as_people_write_them(text: str, params: int) -> None:
    assert parse_params(text) == params


@pytest.mark.parametrize("text", ["", "M", "25X", "999", "1e99", "3G", "-25M", "1.2.3M", "25 M"])
def test_what_is_no_number_of_parameters_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is no number of parameters"):
        parse_params(text)


def test_a_machine_without_room_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="of memory"):
        WirePlan(tmp_path, 2_000_000_000, 16).require_room()


def test_all_fragments_are_of_one_size_and_hold_at_least_what_was_asked_for(tmp_path: Path) -> None:
    spec = WirePlan(tmp_path, 10_000, 2, fragments=6).spec
    program = load_program(spec, None)
    layout = layout_of(program, program.init_params(0), spec)
    assert len({fragment.num_values for fragment in layout.fragments}) == 1
    assert 10_000 <= layout.num_values < 10_000 + len(layout.tensors)


def test_pseudo_gradients_are_normal_and_differ_between_learners_and_steps(tmp_path: Path) -> None:
    program = load_program(WirePlan(tmp_path, 100_000, 2, fragments=2).spec, None)
    base = program.init_params(0)

    def pseudo_gradient(learner: int, cursor: int) -> np.ndarray:
        batch = program.batch(Shard(learner, 2), cursor)
        stepped = program.step(base, program.init_inner(base), batch, jax.numpy.float32(0)).params
        leaves = zip(jax.tree.leaves(base), jax.tree.leaves(stepped), strict=True)
        return np.concatenate([np.asarray(old - new) for old, new in leaves])

    seen = [pseudo_gradient(learner, cursor) for learner in (0, 1) for cursor in (10, 11)]
    for gradient in seen:
        scaled = gradient / gradient.std()
        assert abs(np.mean(scaled**4) - 3) < 0.1  # the fourth moment of a normal distribution
    for index, one in enumerate(seen):
        assert all(not np.array_equal(one, other) for other in seen[:index])


def test_a_stage_is_timed_by_the_gb_and_counts_what_it_took_elsewhere() -> None:
    def work() -> float:
        time.sleep(0.01)
        return 5.0

    stage = measured(work, 2 * 10**9)
    assert stage.fp32_gb_per_s <= 2 / 0.01
    assert 2.5 <= stage.cpu_s_per_gb < 2.6


def test_what_a_round_trip_needs_is_the_sum_of_its_stages() -> None:
    names = ("progress", "quantize", "encode", "decode", "merge", "advance", "unpack")
    found = {name: Ceiling(fp32_gb_per_s=1, cpu_s_per_gb=0.1) for name in names}
    found["grpc"] = Ceiling(fp32_gb_per_s=1, cpu_s_per_gb=1.6)
    found["outer_step"] = Ceiling(fp32_gb_per_s=1, cpu_s_per_gb=0.8)
    costs = stage_costs(found, learners=4, bits_up=2.0, bits_down=4.0)
    # Seven stages for each learner and one more decoding, at the server; the wire by its bits; and
    # a quarter of what the server does once.
    assert sum(costs.values()) == pytest.approx(0.8 + 1.6 * 6 / 32 + (0.8 + 0.1) / 4)
    assert limit_gb_per_s({"all": 0.5}, learners=2, cores=2) == pytest.approx(2.0)


def test_memory_is_counted_above_a_tiny_model_in_sizes_of_the_model() -> None:
    assert peak_ratio(900_000_000, 100_000_000, 100_000_000) == pytest.approx(2.0)


def test_the_hottest_places_are_those_of_the_window_with_all_time_of_their_thread() -> None:
    before = ProbeReport(cpu_s={"a": 100.0, "b": 1.0}, seen={"a": {"x": 50.0}}, connections=())
    after = ProbeReport(
        cpu_s={"a": 104.0, "b": 3.0, "c": 0.001},
        seen={"a": {"x": 50.5, "y": 1.5}},
        connections=(),
    )
    places = hottest(before, after)
    # Of the four seconds of thread a, half of one was seen in x and one and a half in y.
    assert [(each.where, each.cpu_s) for each in places] == [
        ("a | y", 3.0),
        ("b | ", 2.0),
        ("a | x", 1.0),
    ]
    assert places[0].share == pytest.approx(3 / 6.001, abs=1e-3)
    assert hottest(after, after) == ()


def _report(*connections: tuple[int, int, int, int]) -> ProbeReport:
    fields = ("local_port", "peer_port", "bytes_in", "bytes_out")
    made = tuple(Connection(**dict(zip(fields, each, strict=True))) for each in connections)
    return ProbeReport(cpu_s={}, seen={}, connections=made)


def test_bytes_are_those_of_one_port_between_two_reports() -> None:
    before = _report((7701, 1, 100, 10), (7700, 2, 5, 5), (7700, 3, 7, 7))
    after = _report((7701, 1, 350, 20), (7701, 4, 50, 1), (7700, 2, 9, 8), (7700, 5, 70, 70))
    bulk = bulk_traffic(before, after, 7701, frozenset())
    assert (bulk.up_bytes, bulk.down_bytes) == (300, 11)
    bulk = bulk_traffic(before, after, 7701, without=frozenset({4}))
    assert (bulk.up_bytes, bulk.down_bytes) == (250, 10)
    # One that asked for the status came, and one went.
    control = lasting_traffic(before, after, 7700)
    assert (control.up_bytes, control.down_bytes) == (4, 3)
    with pytest.raises(DilocoError, match="broke while"):
        bulk_traffic(after, before, 7701, frozenset())


@pytest.mark.timeout(60)
def test_the_probe_sees_where_time_goes_and_what_crosses_a_socket(tmp_path: Path) -> None:
    report, size = tmp_path / "report.json", 3_000_000
    process = subprocess.Popen(
        module("harness.wire.probe", str(report), "tests.harness.busy", str(size)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
        cwd=Path(__file__).parents[2],
    )
    with process:
        if process.stdout is None or process.stdin is None:
            pytest.fail("both were asked for as pipes")
        ports = json.loads(process.stdout.readline())
        _burn_until(process.pid, 1.0)
        process.send_signal(ASK)
        while not report.exists():
            assert process.poll() is None
            time.sleep(0.01)
        assert peak_bytes(process.pid) > size
        process.stdin.close()
        assert process.wait() == 0
    seen = ProbeReport.model_validate_json(report.read_bytes())
    assert seen.cpu_s["burner"] > 0.7
    assert seen.cpu_s["burner"] > 0.7 * sum(seen.cpu_s.values())
    assert max(seen.seen["burner"], key=seen.seen["burner"].__getitem__).endswith("burn")
    there = {(each.local_port, each.peer_port): each for each in seen.connections}
    assert there[ports["to"], ports["from"]].bytes_in == size
    assert size <= there[ports["from"], ports["to"]].bytes_out <= size + 1  # its SYN counts as one


def _burn_until(pid: int, seconds: float) -> None:
    began_s = cpu_s(pid)
    while cpu_s(pid) - began_s < seconds:
        time.sleep(0.02)


@pytest.mark.timeout(240)
def test_a_tiny_bench_from_end_to_end(tmp_path: Path) -> None:
    lines: list[str] = []
    plan = WirePlan(tmp_path, 100_000, 2, fragments=4, laps=6, limit_s=60, slow_readers=2)
    result = WireBench(plan, threading.Event(), lines.append).run()
    trip = result.round_trip
    assert WireResult.model_validate_json(result.model_dump_json()) == result
    assert (trip.params, trip.learners) == (100_000, 2)
    assert {"memory_copy", "tcp", "grpc", "quantize", "encode", "outer_step"} <= set(
        result.ceilings
    )
    assert 2.0 < trip.bits_up < 5.0
    assert 2.0 < trip.bits_down < 5.0
    assert trip.slow_readers_bytes > 0
    assert 0 < trip.share_of_limit < 1
    assert trip.cpu_s_per_gb_per_learner > sum(result.stages_cpu_s_per_gb.values())
    assert set(trip.cpu_s) == {"server", "learner-1", "learner-2"}
    assert set(result.profile) == {"server", "learner-1"}
    assert any("merge" in place.where for place in result.profile["server"])
    assert any("measuring" in line for line in lines)
    text = io.StringIO()
    Console(width=110, file=text).print(report_view(result))
    assert f"{trip.bits_up:.3f} bits a parameter" in text.getvalue()


@pytest.mark.timeout(60)
def test_an_interrupted_bench_leaves_nothing_behind(tmp_path: Path) -> None:
    mark = f"WIRE_BENCH_OF={tmp_path}"
    process = subprocess.Popen(
        command("bench", "--params", "1000", "--out", str(tmp_path / "out")),
        stderr=subprocess.PIPE,
        text=True,
        env={**child_environment(), "WIRE_BENCH_OF": str(tmp_path)},
    )
    with process:
        if process.stderr is None:
            pytest.fail("it was asked for as a pipe")
        assert "stages alone" in process.stderr.readline()
        while len(_marked(mark)) < 3:  # the bench, the stage, and what that sends to
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait() == 130, rest
    assert "stopped before it was done" in rest
    deadline_s = time.monotonic() + 5
    while _marked(mark) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert _marked(mark) == []


def _marked(mark: str) -> list[int]:
    """The living processes with `mark` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended, or is another user's
            continue
    return [pid for pid in found if pid != os.getpid()]
