"""One contribution up, one fragment down: transfers that go on where they broke."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import google_crc32c
import grpc

from diloco.v1 import common_pb2, pull_pb2, pull_pb2_grpc, push_pb2, push_pb2_grpc
from fragments.chunks import Assembler, split
from fragments.errors import PayloadError, RefusedError, UnreachableError
from fragments.records import (
    Contribution,
    Lease,
    Receipt,
    Refusal,
    RunDescription,
    Update,
    Version,
)
from services import translate
from services.client.retry import Attempts, TransferPace
from services.errors import error_of
from services.settings import ClientSettings
from services.shaper import Intake, Shaper, bytes_s, chunk_bytes


@dataclass(frozen=True, slots=True)
class BulkRoute:
    """What a transfer in one direction needs of its link.

    `channel(again)`: the bulk channel, looked up anew when `again`. `see_generation` raises when
    an older server answers. `server_cap_mbit`: the server's in this direction, which up to
    `sharing` transfers share. `closed` ends every wait for `shaper`. `arrived` is told of the bytes
    of each chunk that came down.
    """

    address: str
    run: RunDescription
    settings: ClientSettings
    pace: TransferPace
    shaper: Shaper
    server_cap_mbit: float | None
    sharing: int
    closed: threading.Event
    arrived: Callable[[int], None]
    channel: Callable[[bool], grpc.Channel]
    see_generation: Callable[[int], None]

    @property
    def chunk_bytes(self) -> int:
        """The largest chunk: under a cap of either end it is short in time."""
        largest = self.settings.chunk_bytes
        return chunk_bytes(largest, self.shaper.cap_mbit, self.server_cap_mbit)

    def deadline_s(self, transfer_bytes: int) -> float:
        """What a transfer of this size is given, seconds; never less than both caps need."""
        cap = self.server_cap_mbit
        share_bytes_s = math.inf if cap is None else bytes_s(cap) / self.sharing
        return self.pace.deadline_s(transfer_bytes, share_bytes_s)


class PushTransfer:
    """Delivers one contribution. `attempt` may be called until it returns."""

    def __init__(self, route: BulkRoute, lease: Lease, contribution: Contribution) -> None:
        self._route = route
        self._lease = lease
        self._contribution = contribution
        self._offset = 0
        self._took_s = 0.0

    def attempt(self, attempts: Attempts) -> Receipt:
        """One call of Push. Raises what was refused or broke."""
        route, size = self._route, len(self._contribution.payload.data)
        stub = push_pb2_grpc.PushServiceStub(route.channel(not attempts.first))
        started_s = time.monotonic()
        try:
            if not attempts.first:
                self._look_up(stub, attempts)
                started_s = time.monotonic()
            deadline_s = route.deadline_s(size - self._offset)
            answer = stub.Push(self._requests(), timeout=deadline_s)
        except grpc.RpcError as error:
            self._took_s = time.monotonic() - started_s
            raise error_of(error, route.address, "a push") from error
        route.pace.observe(size - self._offset, time.monotonic() - started_s)
        route.see_generation(answer.generation)
        outcome = translate.outcome_from_wire(answer, self._lease.learner)
        if isinstance(outcome, Refusal):
            raise RefusedError(outcome.code, outcome.reason)
        return outcome

    def _look_up(self, stub: push_pb2_grpc.PushServiceStub, attempts: Attempts) -> None:
        request = push_pb2.GetPushOffsetRequest(
            lease=translate.lease_to_wire(self._lease),
            key=translate.key_to_wire(self._contribution.key, self._route.run.run_id),
            payload=translate.payload_to_wire(self._contribution.payload),
        )
        answer = stub.GetPushOffset(request, timeout=self._route.settings.call_s)
        attempts.reached(answer.offset)
        if answer.offset > self._offset:
            self._route.pace.observe(answer.offset - self._offset, self._took_s)
        self._offset = answer.offset

    def _requests(self) -> Iterator[push_pb2.PushRequest]:
        header = translate.contribution_to_wire(
            self._contribution,
            self._lease,
            self._route.run.run_id,
            self._route.run.layout_digest,
            self._offset,
        )
        yield self._sent(push_pb2.PushRequest(header=header))
        data = self._contribution.payload.data
        for chunk in split(data, self._route.chunk_bytes, self._offset):
            wire = common_pb2.Chunk(offset=chunk.offset, data=chunk.data)
            yield self._sent(push_pb2.PushRequest(chunk=wire))

    def _sent(self, request: push_pb2.PushRequest) -> push_pb2.PushRequest:
        """The message, when it may be sent."""
        self._route.shaper.wait(request.ByteSize(), self._route.closed)
        self._route.shaper.count(request.ByteSize())
        return request


class PullTransfer:
    """Brings one fragment from `have` to the newest version.

    `expected_bytes` sets the first deadline; it may be wrong, since what arrived stays.
    """

    def __init__(
        self,
        route: BulkRoute,
        lease: Lease,
        fragment: int,
        have: Version | None,
        expected_bytes: int,
    ) -> None:
        self._route = route
        self._lease = lease
        self._fragment = fragment
        self._have = have
        self._expected_bytes = expected_bytes
        self._updates: list[Update] = []
        self._header: pull_pb2.UpdateHeader | None = None
        self._assembler: Assembler | None = None

    @property
    def total_bytes(self) -> int:
        """Payload bytes that arrived whole."""
        return sum(len(update.payload.data) for update in self._updates)

    def attempt(self, attempts: Attempts) -> tuple[Update, ...]:
        """One call of Pull. Raises what was refused or broke; what arrived is kept."""
        route = self._route
        stub = pull_pb2_grpc.PullServiceStub(route.channel(not attempts.first))
        started_s, moved_bytes = time.monotonic(), 0
        intake = Intake(route.shaper, route.chunk_bytes, route.closed)
        call = stub.Pull(self._request(), timeout=route.deadline_s(self._missing_bytes()))
        resuming = self._assembler is not None
        try:
            for message in call:
                intake.after(message.ByteSize())
                if message.WhichOneof("message") == "update":
                    self._begin(message.update, resuming)
                    resuming = False
                else:
                    # A bytes field is copied at each access: read it once.
                    data = message.chunk.data
                    self._append(message.chunk.offset, data)
                    moved_bytes += len(data)
                    route.arrived(len(data))
                    attempts.reached(self._arrived_bytes())
                intake.before(self._left_bytes())
        except grpc.RpcError as error:
            raise error_of(error, route.address, f"a pull of fragment {self._fragment}") from error
        except PayloadError:
            self._header = self._assembler = None
            raise
        finally:
            call.cancel()
            route.pace.observe(moved_bytes, time.monotonic() - started_s)
        if self._assembler is not None:
            raise UnreachableError(f"a pull from {route.address} ended before its last chunk")
        return tuple(self._updates)

    def _request(self) -> pull_pb2.PullRequest:
        have = self._updates[-1].version if self._updates else self._have
        request = pull_pb2.PullRequest(
            lease=translate.lease_to_wire(self._lease),
            run_id=self._route.run.run_id,
            layout_digest=self._route.run.layout_digest,
            fragment=self._fragment,
            have=None if have is None else translate.version_to_wire(have),
            chunk_bytes=self._route.chunk_bytes,
        )
        if self._header is not None and self._assembler is not None:
            request.resume_version.CopyFrom(self._header.version)
            request.resume_offset = self._assembler.received
        return request

    def _arrived_bytes(self) -> int:
        return self.total_bytes + (self._assembler.received if self._assembler is not None else 0)

    def _left_bytes(self) -> int:
        """Of the update that is under way."""
        if self._header is None or self._assembler is None:
            return 0
        return self._header.payload.wire_bytes - self._assembler.received

    def _missing_bytes(self) -> int:
        return self._left_bytes() or max(self._expected_bytes - self.total_bytes, 0)

    def _begin(self, header: pull_pb2.UpdateHeader, resuming: bool) -> None:
        self._route.see_generation(header.generation)
        if self._header is not None:
            if not resuming:
                raise PayloadError("an update began before the last one was complete")
            if _same_bytes(header, self._header):
                return
            # The server has something newer now; what arrived of the old one is of no use. If
            # it still went on at our offset, the next chunk does not fit, and we start over.
        if header.fragment != self._fragment:
            raise PayloadError(f"fragment {header.fragment} came, {self._fragment} was asked for")
        limit = self._route.settings.payload_limit_bytes
        self._header, self._assembler = header, Assembler(header.payload.wire_bytes, limit)

    def _append(self, offset: int, data: bytes) -> None:
        if self._header is None or self._assembler is None:
            raise PayloadError("a chunk came before the header of its update")
        self._assembler.append(offset, data)
        if not self._assembler.complete:
            return
        payload = self._assembler.finish()
        if google_crc32c.value(payload) != self._header.payload.crc32c:
            raise PayloadError("an update was damaged on its way (CRC-32C differs)")
        self._updates.append(translate.update_from_wire(self._header, payload))
        self._header = self._assembler = None


def _same_bytes(one: pull_pb2.UpdateHeader, other: pull_pb2.UpdateHeader) -> bool:
    return (one.version, one.payload) == (other.version, other.payload)
