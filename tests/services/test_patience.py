"""Bulk calls that stop moving give their threads back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import grpc

from diloco.v1 import pull_pb2, pull_pb2_grpc, push_pb2, push_pb2_grpc
from fragments.payload import F32_CODEC
from fragments.records import Update, Version
from services import translate
from tests.services.conftest import Serve
from tests.services.fake import DIGEST, RUN_ID, contribution, hello, payload_of

SILENT_CALLS = 8
WAIT_S = 20.0


def test_pushes_that_say_nothing_do_not_stop_those_that_do(serve: Serve) -> None:
    site = serve(idle_s=0.3, push_threads=SILENT_CALLS)
    link = site.link()
    lease = link.join(hello("eu")).lease
    over = threading.Event()

    def silence() -> Iterator[push_pb2.PushRequest]:
        over.wait(WAIT_S)
        yield from ()

    with grpc.insecure_channel(site.bulk_address) as channel:
        stub = push_pb2_grpc.PushServiceStub(channel)
        calls = [stub.Push.future(silence(), timeout=600.0) for _ in range(2 * SILENT_CALLS)]
        assert not link.push(lease, contribution(os.urandom(1000))).duplicate
        over.set()
        codes = {call.exception(WAIT_S) is not None for call in calls}
    assert codes == {True}


def test_pulls_that_nobody_reads_do_not_stop_those_that_are_read(serve: Serve) -> None:
    site = serve(idle_s=0.3, pull_threads=1)
    link = site.link()
    lease = link.join(hello("eu")).lease
    big, small = os.urandom(32 << 20), b"small"
    for fragment, data in ((0, big), (1, small)):
        payload = payload_of(data, F32_CODEC)
        site.outer.published[fragment] = (Update(fragment, Version(1, 1), None, "0" * 16, payload),)
    request = pull_pb2.PullRequest(
        lease=translate.lease_to_wire(lease), run_id=RUN_ID, layout_digest=DIGEST, fragment=0
    )
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)]
    with grpc.insecure_channel(site.bulk_address, options=small_window) as channel:
        unread = pull_pb2_grpc.PullServiceStub(channel).Pull(request, timeout=600.0)
        next(unread)  # it has the only thread now
        (update,) = link.pull(lease, 1, None)
        unread.cancel()
    assert update.payload.data == small
