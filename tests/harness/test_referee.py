"""The referee on what operators do: what they have undone is void, and nothing of it is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fragments.records import (
    Adopted,
    Contribution,
    ContributionKey,
    Hello,
    Report,
    Role,
    Version,
)
from harness.chaos.ledger import DROPPED, ROLLED_BACK, Acknowledged, Bytes, Ledger
from harness.chaos.referee import judge
from learner.receipts import receipts_in
from outer_server.saver import SnapshotRule
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run, read_run
from tests.support.story import noise
from tests.support.tiny import tiny_birth, tiny_spec
from tests.support.trained import until

NEVER = SnapshotRule(every_rounds=1 << 40, every_s=1e9)


class Pusher:
    """A learner that pushes without being asked, one batch at a time, and keeps its receipts."""

    def __init__(self, server: OuterServer, name: str, receipts: Path) -> None:
        self._server = server
        self._receipts = receipts
        self._step = 0
        self.shard = 0
        digest = server.describe().layout_digest
        self.lease = server.join(Hello(1, "tiny", digest, name, Role.LEARNER, name)).lease
        self.adopt()
        server.attach(self.lease, lambda _note: None)
        self.step()

    def adopt(self) -> None:
        state = self._server.state
        for index, fragment in enumerate(state.fragments):
            at = Version(state.epoch, fragment.version)
            self._server.adopted(self.lease, Adopted(index, at, fragment.digest, self._step))

    def step(self) -> None:
        self._step += 1
        self._server.report(self.lease, Report(self._step, 16 * self._step, self._step))

    def push(self, run: Path, fragment: int, seed: int) -> None:
        state = self._server.state
        base = Version(state.epoch, state.fragments[fragment].version)
        payload = noise(state.spec, read_run(run)[1], fragment, seed)
        key = ContributionKey(self.lease.learner, fragment, base)
        sent = Contribution(key, base, 1, 16, self._step - 1, self._step, payload)
        receipt = self._server.contribute(self.lease, sent)
        with receipts_in(self._receipts) as on_receipt:
            on_receipt(sent, receipt)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    spec = tiny_spec(
        min_learners=2, budget_tokens=1 << 40, program={"factory": "tests.harness.factory:build"}
    )
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    return tmp_path / "run"


def test_what_an_eviction_drops_and_a_rollback_undoes_is_void_and_not_lost(
    run: Path, tmp_path: Path
) -> None:
    receipts = tmp_path / "a.jsonl"
    with OuterServer(run, NEVER, keep_snapshots=100) as server:
        # With one learner of two no round opens, so that what it sends waits.
        first = Pusher(server, "a", receipts)
        first.push(run, 0, seed=1)
        first.push(run, 1, seed=1)
        server.admin.evict("a", "its data was bad", None, drop=True)
        server.admin.release("a", "")
        # The same base again, with other bytes: it counts once.
        again = Pusher(server, "a", receipts)
        again.push(run, 0, seed=2)
        server.admin.roll_back("", 0, "a spike")
        third = Pusher(server, "a", receipts)
        third.push(run, 0, seed=3)
        other = Pusher(server, "b", tmp_path / "b.jsonl")
        other.push(run, 0, seed=4)
        for _ in range(8):
            third.step()
            other.step()
        until(lambda: server.status().rounds_merged == 1, "a merge")
    found = judge(run, [receipts, tmp_path / "b.jsonl"], None)
    assert found.findings == found.differences == ()
    assert (found.acknowledged, found.acknowledged_lost, found.applied_twice) == (4, 0, 0)
    assert (found.voided, found.rollbacks, found.epochs) == (2, 1, 2)
    assert found.fates == {"merged": 2, DROPPED: 1, ROLLED_BACK: 1}
    assert (found.data.merged, found.data.overlaps, found.data.miscounts) == (2, 0, 0)
    assert found.data.gaps["refused"] == 1


def key(fragment: int, number: int) -> ContributionKey:
    return ContributionKey("eu", fragment, Version(1, number))


def test_going_back_undoes_what_was_merged_later_and_what_waits() -> None:
    ledger, payload = Ledger(), Bytes(5, 100)
    keys = [key(0, 0), key(0, 1), key(1, 0), key(1, 1)]
    for each in keys:
        ledger.accept(each, payload)
    ledger.merge([keys[0]], 1, None)
    ledger.merge([keys[1]], 2, None)
    ledger.merge([keys[2]], 1, None)
    ledger.roll_back([1, 0])
    # What was dropped with an eviction may come again, and count.
    other = replace(payload, crc32c=6)
    ledger.void(keys[3], DROPPED)
    ledger.accept(keys[3], other)
    ledger.merge([keys[3]], 1, None)
    receipts = [Acknowledged(each, payload, 1, 0.0) for each in keys]
    verdict = ledger.judge([*receipts, Acknowledged(keys[3], other, 1, 0.0)])
    assert (verdict.lost, verdict.twice, verdict.voided) == (0, 0, 2)
    assert verdict.fates == {"merged": 2, ROLLED_BACK: 2}
    ledger.accept(keys[3], other)
    assert ledger.judge(receipts[:3]).twice == 1
