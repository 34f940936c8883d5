"""Faults by the clock: their schedule, who carries it out, what is made of it, and a real run in
which one of each kind comes.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from cli.verbs.chaos import ChaosSettings, plan_of
from fragments.disk import write_atomically
from fragments.errors import SettingsError
from harness.chaos.breaker import Befell, Breaker
from harness.chaos.full_disk import FillableDisk
from harness.chaos.model import as_one_job, by_papers_rule
from harness.chaos.outages import (
    Downtime,
    Outage,
    OutageKind,
    Rates,
    downtimes,
    draw_outages,
    parse_kinds,
    read_script,
)
from harness.chaos.plan import ChaosPlan, Places
from harness.chaos.recovery import by_kind, delays, restarts, spent
from harness.chaos.report import report
from harness.chaos.run import Chaos
from harness.chaos.schedule import Faults
from harness.plan import SERVER, make_islands, names_of
from tests.support.tiny import tiny_spec

NAMES = ("eu", "us", "asia")


def test_a_schedule_is_the_same_for_its_seed_and_as_dense_as_its_mtbf_says() -> None:
    rates = Rates(90.0, 10.0, (OutageKind.KILL, OutageKind.PARTITION, OutageKind.DISK_FULL))
    drawn = draw_outages(rates, NAMES, 40_000.0, seed=3)
    assert drawn == draw_outages(rates, NAMES, 40_000.0, seed=3)
    assert drawn != draw_outages(rates, NAMES, 40_000.0, seed=4)
    # 400 a unit are expected; four deviations are 80.
    assert all(320 < n < 480 for n in Counter(each.whom for each in drawn).values())
    assert {each.whom for each in drawn if each.what.is_of_server} == {SERVER}
    for unit in (*NAMES, SERVER):
        at_s = [each.at_s or 0.0 for each in drawn if each.whom == unit]
        assert all(b >= a + 10.0 for a, b in pairwise(at_s)), "it is repaired first"
    # Another learner changes nothing for the others.
    alone = draw_outages(rates, ("eu",), 40_000.0, seed=3)
    assert [e for e in drawn if e.whom == "eu"] == [e for e in alone if e.whom == "eu"]
    with pytest.raises(SettingsError, match="longer MTBF"):
        draw_outages(Rates(0.001, 0.001), NAMES, 1000.0, seed=0)


def test_another_way_to_run_the_job_is_driven_by_the_kills() -> None:
    drawn = draw_outages(Rates(50.0, 5.0, (OutageKind.KILL, OutageKind.SLOW)), NAMES, 500.0, 0)
    down = downtimes(drawn)
    assert len(down) == sum(each.what is OutageKind.KILL for each in drawn) > 0
    assert list(down) == sorted(down)
    first = next(each for each in drawn if each.what is OutageKind.KILL)
    assert down[0] == Downtime(first.at_s or 0.0, first.whom, 5.0)


SCRIPT = """
[[faults]]
what = "partition"
whom = "us"
at_s = 20
for_s = 15

[[faults]]
what = "slow"
whom = "eu"
at_tokens = 400_000
for_s = 30
factor = 3

[[faults]]
what = "server-kill"
at_s = 50
for_s = 5
"""


def test_a_script_says_what_befalls_whom_and_when(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(SCRIPT)
    assert read_script(path, NAMES) == (
        Outage(what=OutageKind.PARTITION, whom="us", at_s=20, for_s=15),
        Outage(what=OutageKind.SLOW, whom="eu", at_tokens=400_000, for_s=30, factor=3),
        Outage(what=OutageKind.SERVER_KILL, whom=SERVER, at_s=50, for_s=5),
    )


def test_the_script_of_two_slow_learners_fits_the_run_that_it_is_for() -> None:
    path = Path(__file__).parents[2] / "docs" / "results" / "half-speed.toml"
    slow = read_script(path, names_of(make_islands(4, 0.25, 1.0)))
    assert [(each.what, each.factor) for each in slow] == 2 * [(OutageKind.SLOW, 2.0)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("faults = [", "is not TOML"),
        ("", "it names no fault: give each a table [[faults]]"),
        ("faults = []", "it names no fault"),
        (SCRIPT.replace("[[faults]]", "[faults]", 1).split("[[")[0], "write [[faults]]"),
        (SCRIPT.replace("at_s = 50", "at_s = nan"), "fault 3 at_s: Input should be a finite"),
        (SCRIPT.replace("for_s = 5\n", ""), "fault 3 for_s: is missing"),
        (
            SCRIPT + '[[faults]]\nwhat = "stop"\nwhom = "us"\nat_s = 30\nfor_s = 1',
            "us suffers one thing at a time, and at 30 s it has partition until 35 s",
        ),
        ("[[fault]]", "fault: no such key: did you mean faults?"),
        (SCRIPT.replace("partition", "partitoin"), "fault 1 what: Input should be 'kill'"),
        (SCRIPT.replace('"us"', '"su"'), "fault 1: there is no learner 'su'; there are eu, us"),
        (SCRIPT.replace("factor = 3", ""), "fault 2: what = 'slow' takes factor"),
        (SCRIPT.replace("factor = 3", "mbit = 3"), "fault 2: what = 'slow' takes factor"),
        (SCRIPT.replace("factor = 3", "factor = 3\nmbit = 3"), "fault 2: mbit belongs to"),
        (SCRIPT.replace("at_tokens", "at_token"), "fault 2 at_token: no such key: did you mean"),
        (
            SCRIPT.replace("at_s = 20", "at_s = 20\nat_tokens = 3"),
            "fault 1: give at_s or at_tokens",
        ),
        (SCRIPT.replace("for_s = 5", "for_s = 0"), "fault 3 for_s: Input should be greater than 0"),
        (SCRIPT.replace('"partition"', '"disk-full"'), "fault 1: disk-full befalls the server"),
        (SCRIPT.replace('whom = "us"', ""), "fault 1: partition befalls a learner"),
    ],
)
def test_what_is_wrong_with_a_script_is_said(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as raised:
        read_script(path, NAMES)
    assert sentence in str(raised.value)


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    assert parse_kinds("slow, kill,slow") == (OutageKind.SLOW, OutageKind.KILL)
    with pytest.raises(SettingsError, match="no fault 'klil': did you mean kill"):
        parse_kinds("klil")
    with pytest.raises(SettingsError, match="names none"):
        parse_kinds(" ,")
    with pytest.raises(SettingsError, match="cannot read"):
        plan_of(ChaosSettings(script=tmp_path / "none.toml"), tmp_path)
    with pytest.raises(SettingsError, match="do not go together"):
        plan_of(ChaosSettings(mtbf_s=30, server_kills=1), tmp_path)
    for words, told in (
        ({"faults": "kill"}, "--faults: faults of that kind are drawn with --mtbf-s"),
        ({"repair_s": 3, "slow_factor": 2}, "--repair-s, --slow-factor: faults"),
        ({"tokens": 1000}, "follows from --tokens-per-fault"),
        ({"mtbf_s": 30, "tokens_per_fault": 1000}, "give --tokens"),
    ):
        with pytest.raises(SettingsError, match=told):
            plan_of(ChaosSettings(**words), tmp_path)
    script = tmp_path / "faults.toml"
    script.write_text(SCRIPT.replace('"us"', '"us-east"').replace('"eu"', '"eu-west"'))
    with pytest.raises(SettingsError, match="at_tokens = 400000 of slow is not reached"):
        plan_of(ChaosSettings(script=script, tokens=300_000), tmp_path)
    both = plan_of(ChaosSettings(script=script, mtbf_s=30), tmp_path)
    assert both.scripted == 3 < len(both.outages)
    by_count = plan_of(ChaosSettings(), tmp_path)
    assert (by_count.faults, by_count.outages) == (Faults(server_kills=10, learner_kills=4), ())
    by_clock = plan_of(ChaosSettings(mtbf_s=30, learners=4), tmp_path)
    assert (by_clock.faults, by_clock.budget_tokens) == (Faults(), 1_200_000)
    assert by_clock.outages


@dataclass
class Noted:
    """A site that notes what is done to it, and on which only `there` can be broken."""

    there: set[str]
    done: list[str] = field(default_factory=list)

    def begin(self, outage: Outage) -> bool:
        if outage.whom in self.there:
            self.done.append(f"begin {outage.what} {outage.whom}")
        return outage.whom in self.there

    def end(self, outage: Outage) -> None:
        self.done.append(f"end {outage.what} {outage.whom}")

    def tick(self) -> None:
        pass


def outage(what: OutageKind, whom: str, at_s: float, for_s: float = 10.0) -> Outage:
    factor = 2.0 if what is OutageKind.SLOW else None
    return Outage(what=what, whom=whom, at_s=at_s, for_s=for_s, factor=factor)


def test_one_unit_suffers_one_thing_at_a_time_and_all_is_repaired_at_the_end() -> None:
    first = outage(OutageKind.PARTITION, "eu", 5)
    second = outage(OutageKind.KILL, "eu", 8)
    by_tokens = Outage(what=OutageKind.STOP, whom="us", at_tokens=100, for_s=50)
    never = outage(OutageKind.KILL, "us", 99)
    site = Noted({"eu"})
    breaker = Breaker((first, second, by_tokens, never), site, lambda _line: None)
    for now_s in range(30):
        if now_s == 20:
            site.there.add("us")  # It was being started again.
        breaker.tick(now_s, tokens=10.0 * now_s)
    breaker.finish(30)
    breaker.finish(31)
    assert breaker.unbegun == (never,)
    assert site.done == [
        "begin partition eu",
        "end partition eu",
        "begin kill eu",
        "begin stop us",
        "end kill eu",
        "end stop us",
    ]
    assert [(b.outage, b.began_s, b.ended_s) for b in breaker.befell] == [
        (first, 5, 15),
        (second, 15, 25),
        (by_tokens, 20, 30),
    ]


def befell(what: OutageKind, whom: str, began_s: float, for_s: float = 10.0) -> Befell:
    return Befell(outage(what, whom, began_s, for_s), began_s, began_s + for_s)


def test_one_job_waits_for_whoever_is_down_and_goes_back_to_its_checkpoint() -> None:
    kill = befell(OutageKind.KILL, "eu", 25)
    # 25 s, of which 5 are after a checkpoint; 10 s down, 5 s to restart, and the rest.
    assert as_one_job([kill], 100, 5, 10) == pytest.approx(0.8, abs=0.005)
    assert as_one_job([kill], 100, 5, 1) == pytest.approx(0.85, abs=0.01)
    cut = befell(OutageKind.PARTITION, "us", 60)
    assert as_one_job([cut], 100, 5, 10) == pytest.approx(0.9, abs=0.005)
    slow = befell(OutageKind.SLOW, "us", 60)
    assert as_one_job([slow], 100, 5, 10) == pytest.approx(0.95, abs=0.005)
    # What happens at once costs once, and what the server suffers costs such a job nothing.
    both = [befell(OutageKind.STOP, "eu", 60), cut, befell(OutageKind.SERVER_KILL, SERVER, 80)]
    assert as_one_job(both, 100, 5, 10) == pytest.approx(0.9, abs=0.005)
    assert as_one_job([], 100, 5, 10) == pytest.approx(1.0)
    rule = by_papers_rule([kill, cut], ("eu", "us"), 100, 5, 10)
    assert rule == pytest.approx((0.8 + 1.0) / 2, abs=0.005)


def test_where_the_time_went_sums_to_all_of_it() -> None:
    steps = {
        "eu": [*range(20), *range(45, 100)],  # one a second; killed from 20 to 40
        "us": [*range(50), *range(50, 70, 2), *range(70, 100)],  # slow from 50 to 70
    }
    suffered = [
        befell(OutageKind.KILL, "eu", 20, 20),
        befell(OutageKind.SLOW, "us", 50, 20),
    ]
    paces_s = {"eu": 1.0, "us": 1.0}
    # Of 165 steps, in 200 s of time, 150 were merged.
    found = spent(suffered, steps, (0, 100), paces_s, 0.75, {"crash": 4, "overlap": 1})
    assert (found.merged, found.down, found.returning, found.slowed) == (0.75, 0.1, 0.025, 0.05)
    assert found.unmerged == {"crash": 0.06, "overlap": 0.015}
    assert found.slower == 0.0
    assert delays(suffered, steps) == [25, 20]
    assert restarts(suffered, steps) == [5]
    figures = by_kind(suffered, steps, {"eu": [10.0, 52.0]})
    assert figures["kill"].works_again_s.median == 25
    assert figures["kill"].counts_again_s.median == 32
    assert figures["slow"].counts_again_s.count == 0
    # The next outage came before it was of use again.
    again = [befell(OutageKind.KILL, "eu", 20, 5), befell(OutageKind.KILL, "eu", 30, 10)]
    assert delays(again, steps) == [15]


def test_a_full_disk_takes_half_of_a_write_and_then_nothing(tmp_path: Path) -> None:
    disk = FillableDisk(tmp_path / "full")
    place = tmp_path / "run"
    disk.make_directory(place)
    file = disk.open(place / "a")
    database = disk.connect(place / "tape")
    database.execute("CREATE TABLE t (x)")
    (tmp_path / "full").touch()
    for fails in (
        lambda: file.write(b"12345678"),
        lambda: disk.open(place / "b"),
        lambda: disk.make_directory(place / "c"),
    ):
        with pytest.raises(OSError, match="No space left") as raised:
            fails()
        assert raised.value.errno == errno.ENOSPC
    assert (place / "a").read_bytes() in (b"", b"1234")
    database.execute("BEGIN")
    database.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        disk.commit(database)
    database.execute("ROLLBACK")
    disk.make_directory(place)
    disk.sync_directory(place)
    (tmp_path / "full").unlink()
    file.write(b"9")
    file.close()
    assert (place / "a").read_bytes() == b"12349"
    write_atomically(disk, place / "b", b"b")
    database.execute("BEGIN")
    disk.commit(database)
    database.close()


@pytest.mark.timeout(300)
def test_one_of_each_kind_of_fault_is_survived_and_told(tmp_path: Path) -> None:
    spec = tiny_spec(
        program={"factory": "tests.harness.factory:build"}, sync_interval=8, lease_ttl_s=3.0
    )
    a, b = "eu-west", "us-east"
    # Learners suffer by turns, so that there is always one.
    outages = (
        Outage(what=OutageKind.SLOW, whom=a, at_s=0.5, for_s=2, factor=8),
        Outage(what=OutageKind.PARTITION, whom=b, at_s=0.5, for_s=4),
        Outage(what=OutageKind.DISK_FULL, at_s=4, for_s=2),
        Outage(what=OutageKind.STOP, whom=a, at_s=6, for_s=1),
        Outage(what=OutageKind.RATE, whom=b, at_s=6, for_s=1, mbit=0.5),
        Outage(what=OutageKind.SERVER_KILL, at_s=8, for_s=0.5),
        Outage(what=OutageKind.KILL, whom=b, at_tokens=16 * 220, for_s=0.5),
    )
    plan = ChaosPlan(
        tmp_path,
        spec,
        Faults(),
        learners=2,
        pace_s=0.05,
        outages=outages,
        tokens=16 * 900,
        checkpoint_every_s=1.0,
        restart_s=1.0,
    )
    lines: list[str] = []
    result = Chaos(plan, threading.Event(), lines.append).run()
    assert result.holds, (result.findings, lines)
    assert Counter(each.what for each in result.outages) == dict.fromkeys(OutageKind, 1)
    assert (result.server_kills, result.learner_kills, result.learner_stops) == (1, 1, 1)
    assert result.acknowledged_lost == result.applied_twice == result.digest_mismatches == 0
    assert (result.data.overlaps, result.data.miscounts, result.starts) == (0, 0, 2)
    # Nobody steps faster for it, and whoever is cut off steps on.
    kinds = result.by_kind
    assert kinds["partition"].count == kinds["kill"].works_again_s.count == 1
    assert result.recovery_s.count == result.learner_recovery_s.count == 1
    assert result.spent is not None
    assert result.models is not None
    assert result.models.restart_s == 1.0
    # From the kill: half a second to the repair, and one to the step after it, or later.
    assert (result.learner_recovery_s.median or 0.0) >= 1.5
    assert result.late_s.count <= 1
    assert result.spent.down > 0
    assert result.spent.slowed > 0
    whole = result.spent
    shares = (whole.merged, whole.down, whole.returning, whole.slowed, whole.slower)
    assert sum((*shares, *whole.unmerged.values())) == pytest.approx(1, abs=0.03)
    assert 0 < result.models.data_parallel <= result.models.papers_rule <= 1
    assert result.bytes_up > 0
    assert result.bytes_down > 0
    told = report(result)
    assert all(f"| {kind} | 1 |" in told for kind in OutageKind)
    assert "where the learners' time went" in told
    assert Places(tmp_path).timeline.read_bytes().startswith(b"\x89PNG")
    assert not Places(tmp_path).full.exists()
