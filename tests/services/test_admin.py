"""`diloco admin` over gRPC, on a real server with learners that train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
import pytest

from diloco.v1 import admin_pb2
from fragments.errors import (
    ForbiddenError,
    RefusedError,
    SettingsError,
    StorageError,
    UnreachableError,
)
from fragments.records import (
    PROTOCOL_VERSION,
    Hello,
    LearnerState,
    LearnerStatus,
    Phase,
    RefusalCode,
    Role,
    Welcome,
)
from fragments.tensors import TensorWriter
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from services.client import GrpcLink, fetch_status
from services.client.admin import AdminClient
from services.outer.admin import AdminServicer
from services.outer.server import OuterServices
from services.security import is_near
from services.settings import ServerSettings
from tests.support.tiny import tiny_birth, tiny_spec
from tests.support.trained import WAIT_S, training, until


@dataclass
class Site:
    """A served run and who administers it."""

    address: str
    server: OuterServer
    admin: AdminClient

    def learner(self, name: str) -> LearnerStatus:
        found = {each.name: each for each in fetch_status(self.address).learners}
        return found[name]

    def rounds(self, more: int) -> None:
        before = self.server.status().rounds_merged
        until(lambda: self.server.status().rounds_merged >= before + more, "rounds")


@contextmanager
def _site(path: Path, admin_from: str = "loopback") -> Iterator[Site]:
    spec = tiny_spec(budget_tokens=16 * 100_000, max_learners=4)
    create_run(path, spec, *tiny_birth(spec))
    settings = ServerSettings.model_validate(
        {"address": "127.0.0.1:0", "bulk_port": 0, "admin_from": admin_from}
    )
    with OuterServer(path) as server:
        services = OuterServices(server, settings, server.admin)
        services.start()
        try:
            address = str(services.address)
            yield Site(address, server, AdminClient(address))
        finally:
            services.stop()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with _site(tmp_path / "run") as made:
        yield made


class CountingLink(GrpcLink):
    """Counts how often its process has asked to join."""

    joins = 0

    def join(self, hello: Hello) -> Welcome:
        self.joins += 1
        return super().join(hello)


def test_an_evicted_learner_trains_on_does_not_spin_and_comes_back_with_an_old_base(
    site: Site,
) -> None:
    links: list[CountingLink] = []

    def link() -> CountingLink:
        links.append(CountingLink(site.address))
        return links[-1]

    with training(link, "a", "b") as ends:
        site.rounds(6)
        answered = site.admin.evict("a", "bad data")
        assert answered.changed
        assert "a is evicted until `diloco admin release a`" in answered.sentence
        assert not site.admin.evict("a", "bad data").changed
        assert site.learner("a").state is LearnerState.EVICTED
        with pytest.raises(RefusedError, match=r"evicted by an operator \(bad data\)") as refused:
            site.server.join(_hello(site, "a", "other"))
        assert refused.value.code is RefusalCode.EVICTED
        # The others go on, until what it holds is older than the bound.
        site.rounds(2 * (site.server.state.spec.staleness_bound + 2))
        assert not ends["a"].done(), "its process trains on"
        # A first join of both; then pauses that double from 0.1 s up to 5 s.
        assert sum(each.joins for each in links) <= 2 + 8
        merged = site.learner("a").contributions_merged
        assert site.admin.release("a", "").changed
        until(lambda: site.learner("a").contributions_merged > merged, "its contributions")
        assert site.admin.change((("budget_tokens", "trained"),), "enough").changed
        outcomes = [end.result(WAIT_S) for end in ends.values()]
    assert all(outcome.finished for outcome in outcomes)
    status = fetch_status(site.address)
    assert status.phase is Phase.FINISHED
    assert {outcome.weights_digest for outcome in outcomes} == {status.weights_digest}
    assert status.tokens_trained == sum(outcome.tokens for outcome in outcomes)


def _hello(site: Site, name: str, incarnation: str) -> Hello:
    run = site.server.describe()
    return Hello(PROTOCOL_VERSION, run.run_id, run.layout_digest, name, Role.LEARNER, incarnation)


def test_learners_join_again_after_a_rollback_and_hold_its_values(site: Site) -> None:
    with training(lambda: GrpcLink(site.address), "a", "b") as ends:
        site.rounds(4)
        name = site.admin.snapshot().snapshot
        site.rounds(6)
        before = site.server.status()
        answered = site.admin.roll_back("a spike", name)
        assert f"gone back to snapshot {name} in epoch 2" in answered.sentence
        assert site.server.status().tokens_trained < before.tokens_trained
        site.rounds(4)
        assert site.admin.change([("budget_tokens", "trained")], "").changed
        outcomes = [end.result(WAIT_S) for end in ends.values()]
    status = site.server.status()
    assert (status.epoch, status.phase) == (2, Phase.FINISHED)
    assert {outcome.weights_digest for outcome in outcomes} == {status.weights_digest}


def test_learners_train_on_while_the_run_is_drained(site: Site) -> None:
    with training(lambda: GrpcLink(site.address), "a"):
        site.rounds(2)
        assert site.admin.drain("moving").changed
        assert not site.admin.drain("moving").changed
        until(lambda: not site.server.state.open_rounds)
        before = fetch_status(site.address)
        assert before.phase is Phase.DRAINING
        assert "(moving)" in before.phase_reason
        until(lambda: site.learner("a").steps > before.learners[0].steps + 20, "steps")
        assert site.server.status().rounds_merged == before.rounds_merged
        assert site.admin.release(None, "").changed
        site.rounds(2)


def test_settings_are_changed_all_or_none_and_learners_hear_of_them(site: Site) -> None:
    answered = site.admin.change([("sync_interval", "0:8,0.5:16"), ("quorum", "2")], "thin link")
    assert answered.sentence == "sync_interval: 0:8,0.5:16 instead of 0:4; quorum: 2 instead of 1"
    for changes, sentence in (
        ([("quorun", "2")], "did you mean quorum"),
        ([("quorum", "3"), ("late", "never")], "late 'never'"),
        ([("quorum", "9")], "above max_learners"),
        ([("codec.block", "2")], "learners have read it"),
        ([("outer.momentum", "0")], "the outer optimizer's state would be another"),
        ([], "between 1 and 64 settings"),
    ):
        with pytest.raises(SettingsError, match=sentence):
            site.admin.change(changes, "")
    assert site.server.state.spec.quorum == 2
    with training(lambda: GrpcLink(site.address), "a", "b"):
        until(lambda: site.server.status().sync_interval_steps == 8, "the next slot")


def test_what_cannot_be_done_is_a_sentence(site: Site) -> None:
    with pytest.raises(SettingsError, match="there is no 'eu' in this run"):
        site.admin.evict("eu", "")
    assert not site.admin.release("eu", "").changed
    assert not site.admin.release(None, "").changed
    with pytest.raises(SettingsError, match=r"no snapshot 999; there are 000000 \(epoch 1, 0 rou"):
        site.admin.roll_back("", "999")
    with pytest.raises(UnreachableError, match="diloco admin"):
        AdminClient("127.0.0.1:1").drain("")


@pytest.mark.parametrize(("admin_from", "where"), [("nowhere", "nowhere"), ("loopback", "own mac")])
def test_a_peer_that_may_not_changes_nothing(tmp_path: Path, admin_from: str, where: str) -> None:
    class Elsewhere:
        """What a call from another machine looks like to a servicer."""

        def peer(self) -> str:
            return "ipv4:192.0.2.7:50112"

    with _site(tmp_path / "run", admin_from) as site:
        settings = ServerSettings.model_validate({"admin_from": admin_from})
        servicer = AdminServicer(site.server.admin, settings)
        context = cast("grpc.ServicerContext", Elsewhere())
        calls = (
            lambda: servicer.Drain(admin_pb2.DrainRequest(), context),
            lambda: servicer.Stop(admin_pb2.StopRequest(), context),
            lambda: servicer.Evict(admin_pb2.EvictRequest(learner="a"), context),
            lambda: servicer.Release(admin_pb2.ReleaseRequest(), context),
            lambda: servicer.Set(admin_pb2.SetRequest(), context),
            lambda: servicer.Rollback(admin_pb2.RollbackRequest(), context),
            lambda: servicer.TakeSnapshot(admin_pb2.TakeSnapshotRequest(), context),
        )
        before = site.server.state
        for call in calls:
            with pytest.raises(ForbiddenError, match=f"{where}.*--admin-from"):
                call()
        if admin_from == "nowhere":
            with pytest.raises(ForbiddenError, match="--admin-from"):
                site.admin.drain("")
        assert site.server.state.held == before.held == ""
        assert not site.server.admin.stop_reason


@pytest.mark.parametrize(
    ("peer", "near"),
    [
        ("ipv4:127.0.0.1:5001", True),
        ("ipv4:127.9.9.9:5001", True),
        ("ipv6:%5B::1%5D:5001", True),
        ("ipv6:[::1]:5001", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:5001", True),
        ("unix:/run/diloco", True),
        ("ipv4:10.0.0.1:5001", False),
        ("ipv6:%5B2001:db8::1%5D:5001", False),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5001", False),
        ("ipv6:%5Bfe80::1%25eth0%5D:5001", False),
        ("ipv4:localhost.example:1", False),
        ("", False),
    ],
)
def test_who_is_on_this_machine(peer: str, near: bool) -> None:
    assert is_near(peer) is near


def test_a_disk_that_takes_no_snapshot_is_said(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(TensorWriter, "write", full)
        with pytest.raises(StorageError, match="no snapshot could be written"):
            site.admin.snapshot()
    assert site.admin.snapshot().snapshot
