"""Caps on real servers and links: what crosses the sockets, who waits, and what stays whole."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from diloco.v1 import pull_pb2, pull_pb2_grpc
from fragments.payload import F32_CODEC
from fragments.records import Report, Update, Version
from services import translate
from services.client import GrpcLink, fetch_status
from services.client.retry import TransferPace
from services.settings import ClientSettings
from services.shaper import BYTES_PER_MBIT
from tests.services.conftest import QUICK, Serve, Site
from tests.services.fake import DIGEST, RUN_ID, FakeOuter, contribution, hello, payload_of
from tests.services.proxy import CutProxy

CutBulk = Callable[..., tuple[Site, CutProxy]]

CAP = 8.0
RATE = CAP * BYTES_PER_MBIT
ONCE = QUICK.model_copy(update={"tries": 1})
"""A call that is cut is not made good by another: the test hears of it."""

HEADERS = 1.02
"""HTTP/2 frames, and a first exchange of settings."""


def publish(outer: FakeOuter, data: bytes, fragment: int = 0) -> Update:
    update = Update(fragment, Version(1, 1), None, "0" * 16, payload_of(data, F32_CODEC))
    outer.published[fragment] = (update,)
    return update


def most_in_a_second(crossed: list[tuple[float, int]]) -> int:
    return max(
        sum(size for at_s, size in crossed if since_s <= at_s < since_s + 1.0)
        for since_s, _ in crossed
    )


@pytest.mark.parametrize(
    ("up", "server_caps", "link_caps", "streams", "ahead_s"),
    [
        (True, {}, {"cap_up_mbit": CAP}, 3, 0.1),
        (False, {"cap_send_mbit": CAP}, {}, 3, 0.1),
        # A sender may run ahead of who holds it back by a window of each stream.
        (False, {}, {"cap_down_mbit": CAP}, 1, 0.1 + 0.2),
        (True, {"cap_receive_mbit": CAP}, {}, 3, 0.1 + 3 * 65536 / RATE),
    ],
    ids=["learner up", "server sends", "learner down", "server receives"],
)
def test_what_crosses_the_sockets_obeys_a_cap(
    cut_bulk: CutBulk,
    up: bool,
    server_caps: dict[str, float],
    link_caps: dict[str, float],
    streams: int,
    ahead_s: float,
) -> None:
    """Transfers at once, of one link where the cap is its own, of several where it is not.

    The relay reads up to 64 KiB at once, so that much more may seem to cross in a moment.
    """
    site, proxy = cut_bulk(up=up, cut_after=None, **server_caps)
    total = int(1.5 * RATE)
    data, names = os.urandom(total // streams), "abc"[:streams]
    one = site.link(ONCE, **link_caps)
    links = [one if link_caps else site.link(ONCE) for _ in names]
    publish(site.outer, data)

    def transfer(link: GrpcLink, name: str) -> bytes:
        lease = link.join(hello(name)).lease
        if up:
            link.push(lease, contribution(data, learner=name))
            return site.outer.contributions[-1].payload.data
        (update,) = link.pull(lease, 0, None)
        return update.payload.data

    began_s = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        assert list(pool.map(transfer, links, names)) == [data] * streams
    took_s = time.monotonic() - began_s
    assert took_s >= total / RATE - 0.1 - 1e-3
    assert took_s < 2 * total / RATE + 0.5  # a machine under load; the figure itself is in no test
    assert most_in_a_second(proxy.crossed) <= HEADERS * RATE * (1.0 + ahead_s) + 65536
    assert sum(crossed for _, crossed in proxy.crossed) < HEADERS * total


def test_a_caller_gets_the_chunks_that_it_wants(serve: Serve) -> None:
    site = serve(cap_send_mbit=1.0)
    publish(site.outer, os.urandom(40_000))
    lease = site.link().join(hello()).lease

    def chunks(wanted: int) -> list[int]:
        request = pull_pb2.PullRequest(
            lease=translate.lease_to_wire(lease),
            run_id=RUN_ID,
            layout_digest=DIGEST,
            chunk_bytes=wanted,
        )
        with grpc.insecure_channel(site.bulk_address) as channel:
            answers = list(pull_pb2_grpc.PullServiceStub(channel).Pull(request, timeout=10.0))
        return [len(answer.chunk.data) for answer in answers[1:]]

    assert chunks(0) == [12_500, 12_500, 12_500, 2_500]  # 0.1 s of the server's own cap
    assert chunks(10_000) == [10_000] * 4
    assert chunks(1) == [1024] * 39 + [64]


def test_waiting_for_a_turn_is_not_silence(serve: Serve) -> None:
    """Eight streams each way, at a cap that gives each a turn every 0.8 s, on a server that ends a
    call in which nothing moves for 0.3 s.
    """
    site = serve(FakeOuter(max_learners=8), idle_s=0.3, cap_receive_mbit=0.1, cap_send_mbit=0.1)
    sent = publish(site.outer, os.urandom(3_000))
    names = [f"l{number}" for number in range(8)]

    def push_and_pull(name: str) -> tuple[Update, ...]:
        link = site.link(ONCE)
        lease = link.join(hello(name)).lease
        with ThreadPoolExecutor(1) as other:
            pulled = other.submit(link.pull, lease, 0, None)
            link.push(lease, contribution(os.urandom(3_000), learner=name))
            return pulled.result()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(push_and_pull, names)) == [(sent,)] * 8
    assert len(site.outer.contributions) == 8


@pytest.mark.parametrize("whose", ["learner", "server"])
def test_no_deadline_is_shorter_than_a_cap_needs(serve: Serve, whose: str) -> None:
    """One try, and settings that by themselves would give these transfers half of their time."""
    hasty = ClientSettings(call_s=1.0, deadline_factor=1.0, first_rate_bytes_s=1e9, tries=1)
    of_server = {"cap_receive_mbit": 1.0, "cap_send_mbit": 1.0} if whose == "server" else {}
    of_link = {"cap_up_mbit": 1.0, "cap_down_mbit": 1.0} if whose == "learner" else {}
    link = (site := serve(**of_server)).link(hasty, **of_link)
    lease = link.join(hello()).lease
    publish(site.outer, os.urandom(250_000))
    began_s = time.monotonic()
    with ThreadPoolExecutor(1) as other:
        pulled = other.submit(link.pull, lease, 0, None)
        link.push(lease, contribution(os.urandom(250_000)))
        pulled.result()
    assert time.monotonic() - began_s > 1.5


def test_a_deadline_knows_both_caps() -> None:
    settings = ClientSettings(call_s=10.0, deadline_factor=4.0, first_rate_bytes_s=1e9)
    pace = TransferPace(settings, cap_mbit=8.0)
    assert pace.deadline_s(5_000_000) == 10.0 + 4.0 * 5.0
    assert pace.deadline_s(5_000_000, share_bytes_s=1e5) == 10.0 + 50.0


def test_caps_and_use_are_told_both_ways(serve: Serve) -> None:
    site = serve(cap_receive_mbit=50.0, cap_send_mbit=100.0)
    link = site.link(cap_up_mbit=40.0)
    run = link.describe()
    assert (run.cap_receive_mbit, run.cap_send_mbit) == (50.0, 100.0)
    lease = link.join(hello()).lease
    publish(site.outer, os.urandom(125_000))
    link.push(lease, contribution(os.urandom(250_000)))
    link.pull(lease, 0, None)
    assert link.arrived_bytes == 125_000

    line = link.open_control(lease, lambda note: None, lambda: None)
    line.report(Report(1, 16, 1))
    site.outer.wait(lambda: bool(site.outer.heard))
    (report,) = site.outer.heard
    assert isinstance(report, Report)
    assert (report.cap_up_mbit, report.cap_down_mbit) == (40.0, 0.0)
    assert 0.0 < report.use_down_mbit < report.use_up_mbit <= 2.1
    status = fetch_status(site.address)
    assert (status.cap_receive_mbit, status.cap_send_mbit) == (50.0, 100.0)
    assert 0.0 < status.use_send_mbit < status.use_receive_mbit <= 2.1
    line.close()


def test_closing_a_link_ends_a_wait_for_its_cap(site: Site) -> None:
    link = site.link(ONCE, cap_up_mbit=0.1)
    lease = link.join(hello()).lease
    outcome: list[BaseException] = []

    def push() -> None:
        try:
            link.push(lease, contribution(os.urandom(1_000_000)))  # 80 s
        except Exception as error:  # noqa: BLE001  the test looks at whatever it is
            outcome.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    site.outer.wait(lambda: site.outer.up.get("eu", 0) > 0)
    link.close()
    thread.join(5)
    assert not thread.is_alive()
    assert "closed" in str(outcome[0])
