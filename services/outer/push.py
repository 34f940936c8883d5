"""PushService: contributions up, in chunks, resumable."""

# ruff: noqa: N802 (the contract names the methods)

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import google_crc32c
import grpc

from diloco.v1 import common_pb2, push_pb2, push_pb2_grpc
from fragments.errors import PayloadError, RefusedError, UnreachableError
from fragments.records import ContributionKey, Lease, Receipt, Refusal, RefusalCode
from services import translate
from services.outer.checks import RunIdentity, check_deadline
from services.outer.partials import PartialUploads, UploadId
from services.outer.patience import Patience
from services.outer.port import OuterPort
from services.settings import ServerSettings
from services.shaper import Intake, Shaper, chunk_bytes


def _touching(
    requests: Iterator[push_pb2.PushRequest], patience: Patience
) -> Iterator[push_pb2.PushRequest]:
    for request in requests:
        patience.touch()
        yield request


def _paid(
    requests: Iterator[push_pb2.PushRequest], left_bytes: int, intake: Intake
) -> Iterator[push_pb2.PushRequest]:
    """The chunks of a push of which `left_bytes` are to come, each when it may be read."""
    intake.before(left_bytes)
    for request in requests:
        intake.after(request.ByteSize())
        yield request
        left_bytes = max(0, left_bytes - request.ByteSize())
        intake.before(left_bytes)


class PushServicer(push_pb2_grpc.PushServiceServicer):
    """Pushes into an `OuterPort`.

    What the outer server decides about a contribution is an outcome: a receipt or a refusal in
    the answer. What is wrong with the call itself (damaged or misplaced chunks, no deadline, too
    many pushes at once) ends it with a status. All that is received passes `received`, by turns of
    a chunk.
    """

    def __init__(self, outer: OuterPort, settings: ServerSettings, received: Shaper) -> None:
        self._outer = outer
        self._received = received
        self._chunk_bytes = chunk_bytes(settings.chunk_bytes, received.cap_mbit)
        self._run = RunIdentity.of(outer)
        self._idle_s = settings.idle_s
        self._partials = PartialUploads(
            settings.partial_bytes, settings.partial_age_s, time.monotonic
        )

    def Push(
        self, request_iterator: Iterator[push_pb2.PushRequest], context: grpc.ServicerContext
    ) -> push_pb2.PushResponse:
        """Receives one contribution and hands it on; answered when it is durable."""
        check_deadline(context)
        over = threading.Event()
        if not context.add_callback(over.set):
            raise UnreachableError("the call of this push has ended already")
        with Patience(context, self._idle_s) as patience:
            intake = Intake(self._received, self._chunk_bytes, over, patience.holding)
            return self._push(_touching(request_iterator, patience), intake)

    def _push(
        self, request_iterator: Iterator[push_pb2.PushRequest], intake: Intake
    ) -> push_pb2.PushResponse:
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("message") != "header":
            raise PayloadError("a push begins with its header")
        header = first.header
        outcome: Receipt | Refusal
        try:
            self._run.check(header.key.run_id, header.layout_digest)
            lease = translate.lease_from_wire(header.lease)
            key = translate.key_from_wire(header.key, lease.learner)
            limit = self._admit(lease, key, header.payload)
            self._outer.count_bytes(lease.learner, first.ByteSize(), 0)
            intake.after(first.ByteSize())
            left_bytes = header.payload.wire_bytes - header.offset
            chunks = _paid(request_iterator, left_bytes, intake)
            data = self._receive(key, header, limit, chunks)
            outcome = self._outer.contribute(lease, translate.contribution_from_wire(header, data))
        except RefusedError as error:
            outcome = Refusal(error.code, str(error))
        return translate.outcome_to_wire(outcome, self._run.run_id, self._outer.generation)

    def GetPushOffset(
        self, request: push_pb2.GetPushOffsetRequest, context: grpc.ServicerContext
    ) -> push_pb2.GetPushOffsetResponse:
        """How much of this payload is here."""
        lease = translate.lease_from_wire(request.lease)
        key = translate.key_from_wire(request.key, lease.learner)
        self._outer.admit(lease, key)
        offset = self._partials.received(_identity(key, request.payload))
        return push_pb2.GetPushOffsetResponse(offset=offset)

    def _admit(self, lease: Lease, key: ContributionKey, payload: common_pb2.PayloadHeader) -> int:
        """The most bytes to take. Refuses before any of them is received."""
        self._outer.admit(lease, key)
        codec = self._outer.codec
        if payload.codec != codec:
            raise RefusedError(
                RefusalCode.MISMATCH,
                f"contributions travel as {codec}, not as {payload.codec or 'nothing'}: "
                "update the older program",
            )
        limit = self._outer.payload_limit(key.fragment)
        if not 1 <= payload.wire_bytes <= limit:
            raise RefusedError(
                RefusalCode.BAD_PAYLOAD,
                f"a payload of {payload.wire_bytes} bytes is announced; one of fragment "
                f"{key.fragment} has 1 to {limit}",
            )
        return limit

    def _receive(
        self,
        key: ContributionKey,
        header: push_pb2.PushHeader,
        limit: int,
        requests: Iterator[push_pb2.PushRequest],
    ) -> bytes:
        identity = _identity(key, header.payload)
        with self._partials.receiving(identity, header.offset, limit) as upload:
            for request in requests:
                self._outer.count_bytes(key.learner, request.ByteSize(), 0)
                if request.WhichOneof("message") != "chunk":
                    raise PayloadError("after its header a push has chunks only")
                # A bytes field is copied at each access: read it once.
                upload.append(request.chunk.offset, request.chunk.data)
            data = upload.finish()
        if google_crc32c.value(data) != header.payload.crc32c:
            raise PayloadError("the payload was damaged on its way (CRC-32C differs): send it anew")
        return data


def _identity(key: ContributionKey, payload: common_pb2.PayloadHeader) -> UploadId:
    return UploadId(key, payload.codec, payload.wire_bytes, payload.raw_bytes, payload.crc32c)
