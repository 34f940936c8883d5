"""Chaos on a real run: server and learners are killed, and the referee proves that nothing is lost.

The referee itself is tried on what that run leaves: receipts and tape are tampered with, and it
must say so.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from fragments.errors import DilocoError
from fragments.payload import Payload
from fragments.records import Contribution, ContributionKey, Receipt, Version
from harness.chaos.figures import away, counted, uptime
from harness.chaos.ledger import (
    LEFT_OVER,
    UNEXPLAINED,
    VOID,
    Acknowledged,
    Bytes,
    Ledger,
    read_receipts,
)
from harness.chaos.plan import ChaosPlan, Places
from harness.chaos.points import POINTS, Deed, Point, Trap
from harness.chaos.referee import judge
from harness.chaos.result import ChaosResult
from harness.chaos.run import Chaos
from harness.chaos.schedule import FaultKind, Faults, Schedule, make_schedule
from harness.environment import child_environment
from harness.plan import names_of
from learner.receipts import receipts_in
from tests.support.tiny import tiny_spec

LEASE_S = 5.0


def plan_of(out: Path, faults: Faults) -> ChaosPlan:
    program = {"factory": "tests.harness.factory:build"}
    spec = tiny_spec(program=program, sync_interval=8, lease_ttl_s=LEASE_S)
    return ChaosPlan(out, spec, faults, learners=2, pace_s=0.05, tokens_per_fault=1800)


def chaos(plan: ChaosPlan) -> ChaosResult:
    lines: list[str] = []
    result = Chaos(plan, threading.Event(), lines.append).run()
    assert result.holds, (result.findings, lines)
    return result


@pytest.mark.timeout(600)
def test_ten_kills_of_the_server_and_some_of_learners_lose_and_double_nothing(
    tmp_path: Path,
) -> None:
    plan = plan_of(tmp_path, Faults(server_kills=10, learner_kills=2, learner_stops=1))
    result = chaos(plan)
    assert (result.server_kills, result.learner_kills, result.learner_stops) == (10, 2, 1)
    assert result.acknowledged > 0
    assert result.acknowledged_lost == result.applied_twice == result.digest_mismatches == 0
    assert result.epochs == 1
    # One that was killed while it came back may not have come so far as to say so.
    early = sum(fault.early for fault in plan.schedule.server)
    assert 11 - early <= result.starts <= 11
    assert result.versions > 0
    assert result.leases_lapsed >= 1
    assert result.recovery_s.count == 10 - early
    assert 0 < result.goodput <= 1.1
    assert 0 < result.uptime <= 1
    assert result.loss < 0.5 * result.loss_first
    assert ChaosResult.model_validate_json(Places(tmp_path).result.read_text()) == result
    assert "no promise broken" in Places(tmp_path).report.read_text()
    assert Places(tmp_path).timeline.read_bytes().startswith(b"\x89PNG")

    # Who judges must notice what is not so.
    places = Places(tmp_path)
    forged = tmp_path / "forged.jsonl"
    kept = "".join(places.receipts(name).read_text() for name in names_of(plan.islands))
    receipt = json.loads(kept.splitlines()[0])
    forged.write_text(kept + json.dumps(receipt | {"version": 1_000_000}) + "\n")
    found = judge(tmp_path / "run", [forged], None)
    assert found.acknowledged == result.acknowledged + 1
    assert (found.acknowledged_lost, found.applied_twice) == (1, 0)
    assert found.findings[0].endswith("acknowledged, but not on the tape")
    # Nor can a run be judged whose directory does not reach back to its birth.
    shutil.rmtree(tmp_path / "run" / "snapshots" / "000000")
    with pytest.raises(DilocoError, match="does not reach back to the run's birth"):
        judge(tmp_path / "run", [forged], None)


WRITES = """
import sys
from pathlib import Path
from harness.chaos.points import Trap, TrappedDisk
from fragments.disk import write_atomically

run = Path(sys.argv[1])
disk = TrappedDisk(Trap(run / "trap"), run)
disk.make_directory(run / "payloads")
for number in "12":
    with disk.open(run / "payloads" / "1.bin") as file:
        file.write(b"1")
        file.sync()
    disk.sync_directory(run / "payloads")
    database = disk.connect(run / "tape.sqlite")
    database.execute("BEGIN")
    disk.commit(database)
    database.close()
    draft = run / "snapshots" / f".{number}.new"
    disk.make_directory(draft)
    write_atomically(disk, draft / "manifest.json", b"{}")
    disk.rename(draft, run / "snapshots" / number)
    disk.sync_directory(run / "snapshots")
    write_atomically(disk, run / "server.json", b"{}")
    print(number, flush=True)
"""
"""Does each deed of the file layer, twice, in the order in which a server does them."""


@pytest.mark.parametrize("point", [p for p in POINTS if p.deed is not Deed.ACKNOWLEDGE], ids=str)
def test_a_trap_springs_at_each_point_of_the_file_layer(tmp_path: Path, point: Point) -> None:
    trap = Trap(tmp_path / "trap")
    trap.set(point, 2)
    words = [sys.executable, "-P", "-c", WRITES, str(tmp_path)]
    done = subprocess.run(words, env=child_environment(), capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "1\n"
    assert not trap.is_set


def test_a_schedule_is_the_same_for_its_seed_and_comes_by_every_point() -> None:
    faults = Faults(server_kills=40, point_kills=2, server_away_s=9.0, learner_kills=5)
    schedule = make_schedule(faults, seed=7)
    assert schedule == make_schedule(faults, seed=7)
    assert schedule != make_schedule(faults, seed=8)
    assert Counter(f.point for f in schedule.server if f.point) == dict.fromkeys(POINTS, 2)
    assert sum(fault.early for fault in schedule.server) > 0
    for lane in (schedule.server, schedule.learners):
        for before, after in pairwise(lane):
            assert before.begin <= before.at < before.end == after.begin
        assert lane[-1].end < 1
    kinds = Counter(fault.kind for fault in (*schedule.server, *schedule.learners))
    assert kinds == {
        FaultKind.SERVER_KILL: 40,
        FaultKind.SERVER_POINT: 2 * len(POINTS),
        FaultKind.SERVER_AWAY: 1,
        FaultKind.LEARNER_KILL: 5,
    }
    assert make_schedule(Faults(), seed=0) == Schedule((), ())


def key(number: int) -> ContributionKey:
    return ContributionKey("eu", 0, Version(1, number))


def receipt(number: int, crc32c: int = 5) -> Acknowledged:
    return Acknowledged(key(number), Bytes(crc32c, 100), pid=1, unix_s=0.0)


def ledger_of(numbers: int) -> Ledger:
    ledger = Ledger()
    for number in range(numbers):
        ledger.accept(key(number), Bytes(5, 100))
    return ledger


def test_what_is_acknowledged_must_be_on_the_tape_and_come_to_an_end_with_a_reason() -> None:
    ledger = ledger_of(5)
    ledger.merge([key(0)], 1, None)
    ledger.merge([key(1)], 2, "nothing finite comes of it")
    ledger.drop(key(2), LEFT_OVER)
    verdict = ledger.judge([receipt(0), receipt(0), receipt(1), receipt(2), receipt(3)])
    assert (verdict.acknowledged, verdict.lost, verdict.twice) == (4, 0, 0)
    assert verdict.fates == {
        "left over when the run was finished": 1,
        "merged": 1,
        "not merged: nothing finite comes of it": 1,
        "waiting to be merged": 2,
    }

    ledger.drop(key(3), UNEXPLAINED)
    ledger.drop(key(4), VOID)
    lost = ledger.judge([receipt(3), receipt(4), receipt(9), receipt(0, crc32c=6)])
    assert (lost.acknowledged, lost.lost, lost.twice) == (4, 4, 0)
    assert len(lost.findings) == 4


def test_what_is_accepted_or_merged_twice_is_found_with_and_without_a_receipt() -> None:
    ledger = ledger_of(3)
    ledger.merge([key(0), key(1)], 1, None)
    ledger.merge([key(0)], 2, None)
    ledger.merge([key(1)], 2, "refused the second time")
    ledger.accept(key(2), Bytes(5, 100))
    verdict = ledger.judge([])
    assert (verdict.acknowledged, verdict.lost, verdict.twice) == (0, 0, 2)
    assert "merged 2 times" in verdict.findings[0]
    assert "accepted 2 times" in verdict.findings[1]


def test_receipts_are_what_learners_write_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "receipts" / "eu.jsonl"
    payload = Payload("int8", 8, 77, b"12345")
    base = Version(2, 31)
    sent = Contribution(ContributionKey("eu", 4, base), base, 1, 16, 0, 1, payload)
    assert read_receipts([path]) == []
    for _ in range(2):  # as two processes of the same name do, one after the other
        with receipts_in(path) as on_receipt:
            on_receipt(sent, Receipt(sent.key))
    first, second = read_receipts([path])
    assert first.key == second.key == sent.key
    assert first.payload == Bytes(77, 5)
    with receipts_in(None) as on_receipt:
        on_receipt(sent, Receipt(sent.key))
    path.write_text(path.read_text() + '{"learner": "eu"}\n')
    with pytest.raises(DilocoError, match="line 3 of"):
        read_receipts([path])


def test_uptime_leaves_out_what_was_held_and_counts_what_was_handed_in() -> None:
    steps = counted([0.5, 1.5, 2.5, 3.5, 9.5], last_receipt_s=4.0)
    assert steps == [0.5, 1.5, 2.5, 3.5]
    assert counted([0.5], last_receipt_s=None) == []
    assert uptime(steps, (0.0, 8.0), held=[]) == 0.5
    assert uptime(steps, (0.0, 8.0), held=[(5.2, 5.9)]) == pytest.approx(4 / 7)
    assert uptime([], (0.0, 0.5), held=[]) == 1.0


def test_while_the_server_is_away_the_longest_pause_of_any_learner_counts() -> None:
    found = away({"a": [9.0, 10.5, 11.5, 19.5], "b": [10.0, 12.0, 14.0, 16.0, 18.0]}, (10.0, 20.0))
    assert found.steps == {"a": 3, "b": 5}
    assert found.longest_pause_s == 8.0
    assert found.seconds == 10.0
