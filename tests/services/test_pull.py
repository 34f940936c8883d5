from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from diloco.v1 import pull_pb2, pull_pb2_grpc
from fragments.errors import RefusedError, SettingsError, UnreachableError
from fragments.payload import F32_CODEC, INT8_CODEC
from fragments.records import Lease, RefusalCode, Update, Version
from services import translate
from services.client import GrpcLink
from services.errors import error_of
from services.settings import ClientSettings
from tests.services.conftest import QUICK, Serve, Site
from tests.services.fake import DIGEST, RUN_ID, FakeOuter, hello, payload_of
from tests.services.proxy import CutProxy

MIB = 1 << 20
# A cut also loses what had arrived but was not read, sometimes all of a connection.
PATIENT = QUICK.model_copy(update={"tries": 12, "chunk_bytes": 1 << 18})
CutBulk = Callable[..., tuple[Site, CutProxy]]


def update(number: int, data: bytes, *, full: bool = False, fragment: int = 0) -> Update:
    base = None if full else Version(1, number - 1)
    codec = F32_CODEC if full else INT8_CODEC
    return Update(fragment, Version(1, number), base, f"{number:016x}", payload_of(data, codec))


def joined(link: GrpcLink, name: str = "eu") -> Lease:
    return link.join(hello(name)).lease


def test_a_chain_arrives_oldest_first_and_is_counted(site: Site) -> None:
    chain = (update(1, os.urandom(3 * MIB + 1)), update(2, b"b"), update(3, os.urandom(MIB)))
    site.outer.published[0] = chain
    link = site.link()
    lease = joined(link)
    assert link.pull(lease, 0, Version(1, 0)) == chain
    assert link.pull(lease, 0, Version(1, 2)) == chain[2:]
    assert link.pull(lease, 0, Version(1, 3)) == ()
    assert link.pull(lease, 1, None) == ()
    size = 5 * MIB
    assert size < site.outer.down["eu"] < size + 3000


def test_a_newcomer_gets_a_full_value(site: Site) -> None:
    site.outer.published[2] = (update(7, b"full" * 1000, full=True, fragment=2),)
    link = site.link()
    assert link.pull(joined(link), 2, None) == site.outer.published[2]


def test_a_broken_pull_goes_on_where_it_broke(cut_bulk: CutBulk) -> None:
    site, proxy = cut_bulk(up=False, cut_after=5 * MIB)
    chain = (update(1, os.urandom(7 * MIB)), update(2, os.urandom(7 * MIB)))
    site.outer.published[0] = chain
    link = site.link(PATIENT)
    assert link.pull(joined(link), 0, Version(1, 0)) == chain
    assert proxy.cuts >= 2
    assert site.outer.down["eu"] > 14 * MIB


def test_a_newer_version_in_the_middle_of_a_resume_is_taken(cut_bulk: CutBulk) -> None:
    """The server threw the update away that broke; the learner gets what there is instead."""
    site, proxy = cut_bulk(up=False, cut_after=3 * MIB)
    old, new = update(1, os.urandom(6 * MIB)), update(5, os.urandom(MIB), full=True)
    site.outer.published[0] = (old,)
    link = site.link(PATIENT)
    lease = joined(link)
    taken = site.outer.updates

    def updates(lease: Lease, fragment: int, have: Version | None) -> tuple[Update, ...]:
        if proxy.cuts:
            site.outer.published[0] = (new,)
        return taken(lease, fragment, have)

    site.outer.updates = updates  # type: ignore[method-assign]
    assert link.pull(lease, 0, Version(1, 0)) == (new,)


def test_the_same_version_in_other_bytes_is_started_over(cut_bulk: CutBulk) -> None:
    """A resume that meets a full value of the same version must not join two halves."""
    site, proxy = cut_bulk(up=False, cut_after=3 * MIB)
    old, new = update(1, os.urandom(6 * MIB)), update(1, os.urandom(9 * MIB), full=True)
    site.outer.published[0] = (old,)
    link = site.link(PATIENT)
    lease = joined(link)
    taken = site.outer.updates

    def updates(lease: Lease, fragment: int, have: Version | None) -> tuple[Update, ...]:
        if proxy.cuts:
            site.outer.published[0] = (new,)
        return taken(lease, fragment, have)

    site.outer.updates = updates  # type: ignore[method-assign]
    assert link.pull(lease, 0, Version(1, 0)) == (new,)


def test_damage_is_seen_and_tried_again_then_given_up(site: Site) -> None:
    good = update(1, os.urandom(3 * MIB))
    bad = replace(good, payload=replace(good.payload, crc32c=good.payload.crc32c ^ 1))
    site.outer.published[0] = (bad,)
    link = site.link(QUICK.model_copy(update={"tries": 2, "retry_wait_max_s": 0.1}))
    lease = joined(link)
    with pytest.raises(UnreachableError, match="CRC-32C"):
        link.pull(lease, 0, Version(1, 0))
    site.outer.published[0] = (good,)
    assert link.pull(lease, 0, Version(1, 0)) == (good,)


def test_a_payload_above_the_learners_bound_is_not_taken(site: Site) -> None:
    site.outer.published[0] = (update(1, os.urandom(MIB)),)
    link = site.link(QUICK.model_copy(update={"payload_limit_bytes": 1000, "tries": 1}))
    with pytest.raises(UnreachableError, match="between 1 and 1000"):
        link.pull(joined(link), 0, None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"run_id": "run-2"}, "trains run 'run-1', not 'run-2'"),
        ({"run_id": ""}, "not ''"),
        ({"layout_digest": "0" * 64}, "the layout differs"),
        ({"layout_digest": ""}, "digest missing"),
    ],
)
def test_another_run_is_refused(site: Site, change: dict[str, str], says: str) -> None:
    request = _request(joined(site.link()))
    for name, value in change.items():
        setattr(request, name, value)
    with pytest.raises(RefusedError, match=says) as caught:
        _pull(site, request)
    assert caught.value.code is RefusalCode.MISMATCH


def test_a_stranger_gets_nothing(site: Site) -> None:
    with pytest.raises(RefusedError, match="does not know this lease") as caught:
        _pull(site, _request(Lease("nobody", 1, 1.0)))
    assert caught.value.code is RefusalCode.LEASE_LOST


def test_a_resume_beyond_the_end_and_a_missing_deadline_are_turned_away(site: Site) -> None:
    site.outer.published[0] = (update(1, b"abc"),)
    request = _request(joined(site.link()))
    request.resume_version.CopyFrom(translate.version_to_wire(Version(1, 1)))
    request.resume_offset = 4
    with pytest.raises(SettingsError, match="byte 4 of 3"):
        _pull(site, request)
    with pytest.raises(SettingsError, match="deadline of at most 3600 s"):
        _pull(site, request, timeout=None)


def test_a_slow_reader_slows_nobody_and_its_deadline_ends_it(serve: Serve) -> None:
    site = serve(FakeOuter(), pull_threads=4)
    site.outer.published[0] = chain = (update(1, os.urandom(24 * MIB)),)
    link = site.link()
    lease = joined(link)
    with grpc.insecure_channel(site.bulk_address) as channel:
        stub = pull_pb2_grpc.PullServiceStub(channel)
        slow = [stub.Pull(_request(lease), timeout=3) for _ in range(3)]
        for call in slow:
            next(call)  # the header; then it reads no more
        for _ in range(3):
            assert link.pull(lease, 0, Version(1, 0)) == chain
        ended = threading.Semaphore(0)
        for call in slow:
            # Nothing more is read; the deadline ends the call at both ends.
            if call.add_callback(ended.release):
                assert ended.acquire(timeout=10)
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert link.pull(lease, 0, Version(1, 0)) == chain


def test_readers_share_the_payload(serve: Serve) -> None:
    """Twelve at once of one 16 MiB update; each holds a chunk or two, not a copy."""
    site = serve(FakeOuter(max_learners=12))
    site.outer.published[0] = chain = (update(1, os.urandom(16 * MIB)),)
    got: list[bool] = []

    def pull(name: str) -> None:
        link = site.link(ClientSettings())
        got.append(link.pull(joined(link, name), 0, Version(1, 0)) == chain)

    threads = [threading.Thread(target=pull, args=(f"l{i}",)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == [True] * 12


def _request(lease: Lease) -> pull_pb2.PullRequest:
    return pull_pb2.PullRequest(
        lease=translate.lease_to_wire(lease), run_id=RUN_ID, layout_digest=DIGEST, fragment=0
    )


def _pull(
    site: Site, request: pull_pb2.PullRequest, timeout: float | None = 10
) -> list[pull_pb2.PullResponse]:
    with grpc.insecure_channel(site.bulk_address) as channel:
        try:
            return list(pull_pb2_grpc.PullServiceStub(channel).Pull(request, timeout=timeout))
        except grpc.RpcError as error:
            raise error_of(error, site.bulk_address, "a pull") from error
