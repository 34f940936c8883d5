from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from diloco.v1 import common_pb2, push_pb2, push_pb2_grpc
from fragments.chunks import split
from fragments.errors import DilocoError, PayloadError, RefusedError, SettingsError
from fragments.records import Contribution, Lease, Receipt, Refusal, RefusalCode
from services import translate
from services.client import GrpcLink
from services.errors import error_of
from services.settings import ClientSettings
from tests.services.conftest import QUICK, Serve, Site
from tests.services.fake import DIGEST, LIMIT, RUN_ID, FakeOuter, contribution, hello
from tests.services.proxy import CutProxy

MIB = 1 << 20
SMALL_CHUNKS = QUICK.model_copy(update={"tries": 8, "chunk_bytes": 1 << 16})

CutBulk = Callable[..., tuple[Site, CutProxy]]


def joined(link: GrpcLink, name: str = "eu") -> Lease:
    return link.join(hello(name)).lease


def test_a_contribution_arrives_whole_and_is_counted(site: Site) -> None:
    link = site.link()
    sent = contribution(os.urandom(5 * MIB + 3))
    receipt = link.push(joined(link), sent)
    assert (receipt.key, receipt.duplicate, receipt.late) == (sent.key, False, False)
    assert site.outer.contributions == [sent]
    size = len(sent.payload.data)
    assert size < site.outer.up["eu"] < size + 1000


def test_a_repeated_push_counts_once_and_another_payload_is_refused(site: Site) -> None:
    """What happens when an answer was lost: the very same push again."""
    link = site.link()
    lease = joined(link)
    link.push(lease, contribution(b"abc" * 1000))
    assert link.push(lease, contribution(b"abc" * 1000)).duplicate
    assert len(site.outer.contributions) == 1
    with pytest.raises(RefusedError, match="consumed already") as caught:
        link.push(lease, contribution(b"abd" * 1000))
    assert caught.value.code is RefusalCode.CONSUMED


def test_a_lost_answer_is_asked_for_again(cut_bulk: CutBulk) -> None:
    """The link dies after the last byte: the server has it, the learner has no receipt."""
    site, proxy = cut_bulk(up=False, cut_after=None)
    link = site.link()
    lease = joined(link)
    taken = site.outer.contribute
    calls = []

    def contribute(lease: Lease, contribution: Contribution) -> Receipt:
        receipt = taken(lease, contribution)
        calls.append(receipt.duplicate)
        if len(calls) == 1:
            proxy.cut()
        return receipt

    site.outer.contribute = contribute  # type: ignore[method-assign]
    assert link.push(lease, contribution(os.urandom(MIB))).duplicate
    assert calls == [False, True]
    assert len(site.outer.contributions) == 1


def test_a_broken_push_goes_on_where_it_broke(cut_bulk: CutBulk) -> None:
    site, proxy = cut_bulk(up=True, cut_after=5 * MIB)
    link = site.link(SMALL_CHUNKS)
    size = 18 * MIB
    sent = contribution(os.urandom(size))
    link.push(joined(link), sent)
    assert site.outer.contributions == [sent]
    assert proxy.cuts >= 3
    # What had arrived is not sent again.
    assert size < site.outer.up["eu"] < size * 1.1


def test_progress_renews_patience(cut_bulk: CutBulk) -> None:
    """More breaks than tries, each after some progress: it still arrives."""
    site, proxy = cut_bulk(up=True, cut_after=3 * MIB)
    settings = SMALL_CHUNKS.model_copy(update={"tries": 5})
    link = site.link(settings)
    sent = contribution(os.urandom(24 * MIB))
    link.push(joined(link), sent)
    assert site.outer.contributions == [sent]
    assert proxy.cuts > settings.tries


def test_a_server_started_anew_elsewhere_is_found(serve: Serve) -> None:
    """Bulk moved to another port while the link was idle: the retry asks where it is."""
    outer = FakeOuter()
    first = serve(outer)
    link = first.link()
    lease = joined(link)
    link.push(lease, contribution(b"a" * 100))
    control = first.services.ports.control
    first.services.stop(grace_s=0)
    serve(outer, address=f"127.0.0.1:{control}")
    link.push(lease, contribution(b"b" * 100, base=1))
    assert len(outer.contributions) == 2


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"fragment": 99}, RefusalCode.MISMATCH, "no fragment 99"),
        ({"codec": "int4/9"}, RefusalCode.MISMATCH, "int4/9: update the older"),
        ({"run_id": "run-2"}, RefusalCode.MISMATCH, "trains run 'run-1', not 'run-2'"),
        ({"layout_digest": "0" * 64}, RefusalCode.MISMATCH, "the layout differs"),
        ({"token": 99}, RefusalCode.LEASE_LOST, "does not know this lease"),
        ({"wire_bytes": LIMIT + 1}, RefusalCode.BAD_PAYLOAD, f"1 to {LIMIT}"),
        ({"wire_bytes": 0}, RefusalCode.BAD_PAYLOAD, "a payload of 0 bytes"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_before_the_bytes(
    site: Site, change: dict[str, object], code: RefusalCode, says: str
) -> None:
    lease = joined(site.link())
    header = _header(lease, contribution(b"x" * 1000))
    for part in (header, header.key, header.payload, header.lease):
        for name, value in change.items():
            if name in part.DESCRIPTOR.fields_by_name:
                setattr(part, name, value)
    drawn = []

    def endless() -> Iterator[push_pb2.PushRequest]:
        yield push_pb2.PushRequest(header=header)
        for offset in range(0, 1000 * MIB, MIB):
            drawn.append(offset)
            yield _chunk(offset, b"x" * MIB)

    answer = _push(site, endless())
    outcome = translate.outcome_from_wire(answer, "eu")
    with pytest.raises(RefusedError, match=says) as caught:
        _raise(outcome)
    assert caught.value.code is code
    assert len(drawn) < 200
    assert site.outer.contributions == []


def test_damaged_bytes_are_thrown_away_with_the_right_code(site: Site) -> None:
    lease = joined(site.link())
    sent = contribution(os.urandom(3000))
    data = bytearray(sent.payload.data)
    data[1500] ^= 1
    with pytest.raises(PayloadError, match="CRC-32C"):
        _push(site, _messages(lease, sent, bytes(data)))
    assert _offset(site, lease, sent) == 0
    assert site.outer.contributions == []


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (lambda header, _: [], "begins with its header"),
        (lambda header, chunks: chunks, "begins with its header"),
        (lambda header, chunks: [header, header], "chunks only"),
        (lambda header, chunks: [header, push_pb2.PushRequest()], "chunks only"),
        (lambda header, chunks: [header, chunks[1]], "expected 0"),
        (lambda header, chunks: [header, chunks[0], chunks[0]], "expected 1000"),
        (lambda header, chunks: [header, chunks[0]], "ends after 1000 of 3000"),
        (lambda header, chunks: [header, *chunks, _chunk(3000, b"y")], "past the declared"),
        (lambda header, chunks: [header, chunks[0], _chunk(1000, b"")], "is empty"),
    ],
)
def test_misplaced_messages_are_data_loss(
    site: Site,
    messages: Callable[..., list[push_pb2.PushRequest]],
    says: str,
) -> None:
    lease = joined(site.link())
    header, *chunks = _messages(lease, sent := contribution(os.urandom(3000)), chunk_bytes=1000)
    with pytest.raises(PayloadError, match=says):
        _push(site, iter(messages(header, chunks)))
    assert site.outer.contributions == []
    # Nothing of it keeps the right one from arriving.
    assert _push(site, _messages(lease, sent)).HasField("receipt")


def test_what_arrived_of_a_broken_push_is_told_and_resumed(site: Site) -> None:
    lease = joined(site.link())
    sent = contribution(os.urandom(3000))
    messages = list(_messages(lease, sent, chunk_bytes=1000))
    with pytest.raises(PayloadError, match="ends after 2000"):
        _push(site, iter(messages[:3]))
    assert _offset(site, lease, sent) == 2000
    messages[0].header.offset = 1000
    with pytest.raises(PayloadError, match="2000 are here"):
        _push(site, iter(messages))
    messages[0].header.offset = 2000
    assert _push(site, iter([messages[0], messages[3]])).HasField("receipt")
    assert site.outer.contributions == [sent]
    assert _offset(site, lease, sent) == 0


def test_a_later_call_takes_a_push_over_from_a_stuck_one(site: Site) -> None:
    """A link that broke without a word: the server still waits on the old call."""
    lease = joined(site.link())
    sent = contribution(os.urandom(3000))
    messages = list(_messages(lease, sent, chunk_bytes=1000))
    hold = threading.Event()
    outcome: list[DilocoError] = []

    def stuck() -> Iterator[push_pb2.PushRequest]:
        yield from messages[:2]
        hold.wait(10)
        yield from messages[2:]

    def old_call() -> None:
        try:
            _push(site, stuck())
        except DilocoError as error:
            outcome.append(error)

    thread = threading.Thread(target=old_call)
    thread.start()
    give_up_s = time.monotonic() + 10
    while _offset(site, lease, sent) < 1000:
        assert time.monotonic() < give_up_s
    messages[0].header.offset = 1000
    assert _push(site, iter([messages[0], *messages[2:]])).HasField("receipt")
    hold.set()
    thread.join(10)
    assert "took over" in str(outcome[0])
    assert site.outer.contributions == [sent]


def test_a_message_above_the_limit_is_turned_away(site: Site) -> None:
    lease = joined(site.link())
    sent = contribution(os.urandom(5 * MIB))
    with pytest.raises(DilocoError, match="larger than max"):
        _push(site, _messages(lease, sent, chunk_bytes=5 * MIB))
    assert site.outer.contributions == []


def test_a_message_that_cannot_be_read_ends_the_push_and_is_not_its_end(site: Site) -> None:
    """All bytes are here when it comes: it is damage all the same, and the push is not taken."""
    lease = joined(site.link())
    sent = contribution(os.urandom(3000))
    whole = [message.SerializeToString() for message in _messages(lease, sent)]
    with grpc.insecure_channel(site.bulk_address) as channel:
        call: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(
            "/diloco.v1.PushService/Push"
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(iter([*whole, b"\x0a\xff"]), timeout=10)
        assert isinstance(error_of(caught.value, site.bulk_address, "a push"), PayloadError)
    assert site.outer.contributions == []
    assert _push(site, _messages(lease, sent)).HasField("receipt")


def test_a_call_without_a_deadline_is_turned_away(site: Site) -> None:
    lease = joined(site.link())
    with pytest.raises(SettingsError, match="deadline of at most 3600 s"):
        _push(site, _messages(lease, contribution(b"x")), timeout=None)


def test_many_learners_push_at_once(serve: Serve) -> None:
    """More than there are threads: the others wait their turn, and none is lost."""
    site = serve(FakeOuter(max_learners=12), push_threads=2)
    sent = [contribution(os.urandom(2 * MIB), learner=f"l{i}") for i in range(12)]

    def push(one: Contribution) -> None:
        link = site.link(ClientSettings())
        link.push(joined(link, one.key.learner), one)

    threads = [threading.Thread(target=push, args=(one,)) for one in sent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    arrived = sorted(site.outer.contributions, key=sent.index)
    assert arrived == sent


def _header(lease: Lease, sent: Contribution) -> push_pb2.PushHeader:
    return translate.contribution_to_wire(sent, lease, RUN_ID, DIGEST, 0)


def _chunk(offset: int, data: bytes) -> push_pb2.PushRequest:
    return push_pb2.PushRequest(chunk=common_pb2.Chunk(offset=offset, data=data))


def _messages(
    lease: Lease, sent: Contribution, data: bytes | None = None, chunk_bytes: int = 1 << 20
) -> Iterator[push_pb2.PushRequest]:
    yield push_pb2.PushRequest(header=_header(lease, sent))
    for chunk in split(sent.payload.data if data is None else data, chunk_bytes):
        yield _chunk(chunk.offset, chunk.data)


def _push(
    site: Site, messages: Iterator[push_pb2.PushRequest], timeout: float | None = 10
) -> push_pb2.PushResponse:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(site.bulk_address, options=options) as channel:
        try:
            return push_pb2_grpc.PushServiceStub(channel).Push(messages, timeout=timeout)
        except grpc.RpcError as error:
            raise error_of(error, site.bulk_address, "a push") from error


def _offset(site: Site, lease: Lease, sent: Contribution) -> int:
    request = push_pb2.GetPushOffsetRequest(
        lease=translate.lease_to_wire(lease),
        key=translate.key_to_wire(sent.key, RUN_ID),
        payload=translate.payload_to_wire(sent.payload),
    )
    with grpc.insecure_channel(site.bulk_address) as channel:
        answer = push_pb2_grpc.PushServiceStub(channel).GetPushOffset(request, timeout=5)
    return answer.offset


def _raise(outcome: object) -> None:
    assert isinstance(outcome, Refusal)
    raise RefusedError(outcome.code, outcome.reason)
