"""`learner.ports.Link` over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import grpc
import structlog

from diloco.v1 import control_pb2, control_pb2_grpc
from fragments.errors import DilocoError, RefusedError, UnreachableError
from fragments.records import (
    PROTOCOL_VERSION,
    Contribution,
    Hello,
    Lease,
    Receipt,
    RefusalCode,
    Report,
    RunDescription,
    ServerNote,
    Update,
    Version,
    Welcome,
)
from fragments.runspec import RunSpec
from services import translate
from services.client.channel import open_channel
from services.client.line import GrpcControlLine
from services.client.retry import Attempts, TransferPace, retried
from services.client.transfer import BulkRoute, PullTransfer, PushTransfer
from services.errors import OlderServerError, error_of
from services.security import Address, parse_address
from services.settings import ClientSettings
from services.shaper import Shaper, told_cap, window_options

_log = structlog.get_logger(__name__)
_Result = TypeVar("_Result")

LEAVE_S = 1.5
"""Deadline of giving a lease back: a process that was told to stop waits no longer."""

FIRST_PULL_BYTES = 16 << 20
"""Assumed of a fragment that was never pulled; a wrong guess costs a resumed call."""


class GrpcLink:
    """The outer server at `address` (HOST:PORT of control). Thread-safe.

    One channel for control, another for bulk, whose port `describe` tells. Every call is bounded
    in time and tries. Refusals raise RefusedError; all else that keeps a call from succeeding ends
    in UnreachableError, with a sentence that names the address and what to check. SettingsError
    for a malformed address.

    `cap_up_mbit` and `cap_down_mbit` bound its pushes and its pulls, Mbit/s; None for no cap.
    """

    def __init__(
        self,
        address: str,
        *,
        settings: ClientSettings | None = None,
        cap_up_mbit: float | None = None,
        cap_down_mbit: float | None = None,
    ) -> None:
        self._address = parse_address(address)
        self._settings = settings or ClientSettings()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._generation = 0
        self._run: RunDescription | None = None
        self._channel = open_channel(self._address)
        self._control = control_pb2_grpc.ControlServiceStub(self._channel)
        self._bulk: tuple[Address, grpc.Channel] | None = None
        self._up, self._down = Shaper(cap_up_mbit), Shaper(cap_down_mbit)
        self._up_pace = TransferPace(self._settings, cap_up_mbit)
        self._down_pace = TransferPace(self._settings, cap_down_mbit)
        self._pulled_bytes: dict[int, int] = {}
        self._arrived_bytes = 0

    @property
    def arrived_bytes(self) -> int:
        """Payload bytes pulled so far, damaged ones among them."""
        return self._arrived_bytes

    def describe(self) -> RunDescription:
        """What is trained here. Refuses (MISMATCH) once another run or layout answers."""
        return self._tried(lambda _: self._describe())

    def join(self, hello: Hello) -> Welcome:
        """Take the lease for a name; repeated until answered, which the server expects."""
        with self._lock:  # what the process saw before this link was made
            self._generation = max(self._generation, hello.generation_seen)
        request = translate.hello_to_wire(hello)

        def attempt(_: Attempts) -> Welcome:
            try:
                answer = self._control.Join(request, timeout=self._settings.call_s)
            except grpc.RpcError as error:
                raise error_of(error, str(self._address), "joining") from error
            self._see_generation(answer.generation)
            return translate.welcome_from_wire(answer)

        return self._tried(attempt)

    def open_control(
        self,
        lease: Lease,
        on_note: Callable[[ServerNote], None],
        on_closed: Callable[[], None],
    ) -> GrpcControlLine:
        """Open the control stream of a lease."""
        return self._guarded(
            lambda: GrpcControlLine(
                self._control,
                str(self._address),
                self._see_generation,
                lease,
                on_note,
                on_closed,
                self._with_traffic,
                self._settings.queued_messages,
            )
        )

    def push(self, lease: Lease, contribution: Contribution) -> Receipt:
        """Deliver a contribution, going on where a call broke; it counts once."""
        transfer = PushTransfer(self._up_route(), lease, contribution)
        return self._tried(transfer.attempt)

    def pull(self, lease: Lease, fragment: int, have: Version | None) -> tuple[Update, ...]:
        """What brings `fragment` from `have` to the newest version, oldest first."""
        expected = self._pulled_bytes.get(fragment, FIRST_PULL_BYTES)
        transfer = PullTransfer(self._down_route(), lease, fragment, have, expected)
        updates = self._tried(transfer.attempt)
        if updates:
            self._pulled_bytes[fragment] = transfer.total_bytes
        return updates

    def leave(self, lease: Lease, reason: str) -> None:
        """Give the lease back; one try, and no error if it fails."""
        request = control_pb2.LeaveRequest(lease=translate.lease_to_wire(lease), reason=reason)
        try:
            self._guarded(lambda: self._control.Leave(request, timeout=LEAVE_S))
        except grpc.RpcError as error:
            _log.info("not_left", reason=str(error_of(error, str(self._address), "leaving")))
        except UnreachableError as error:
            _log.info("not_left", reason=str(error))

    def close(self) -> None:
        """Close all channels; calls under way end with UnreachableError. Idempotent."""
        self._closed.set()
        with self._lock:
            channels = [self._channel] if self._bulk is None else [self._channel, self._bulk[1]]
        for channel in channels:
            channel.close()

    def _describe(self) -> RunDescription:
        request = control_pb2.DescribeRunRequest(protocol_version=PROTOCOL_VERSION)
        try:
            answer = self._control.DescribeRun(request, timeout=self._settings.call_s)
        except grpc.RpcError as error:
            raise error_of(error, str(self._address), "asking for the run") from error
        self._see_generation(answer.generation)
        run = translate.description_from_wire(answer)
        with self._lock:
            known = self._run
            if known is not None and (known.run_id, known.layout_digest) != (
                run.run_id,
                run.layout_digest,
            ):
                raise RefusedError(
                    RefusalCode.MISMATCH,
                    f"run {run.run_id!r} answers at {self._address} where {known.run_id!r} did, "
                    "or its layout changed: start this process anew",
                )
            self._run = run
        return run

    def _see_generation(self, generation: int) -> None:
        with self._lock:
            seen = self._generation
            self._generation = max(seen, generation)
        if generation < seen:
            raise OlderServerError(
                f"an older server (generation {generation}, {seen} was seen) answers at "
                f"{self._address}: stop it, or correct the address"
            )

    def _up_route(self) -> BulkRoute:
        run = self._run or self.describe()
        return self._route(run, self._up_pace, self._up, run.cap_receive_mbit)

    def _down_route(self) -> BulkRoute:
        run = self._run or self.describe()
        return self._route(run, self._down_pace, self._down, run.cap_send_mbit)

    def _route(
        self, run: RunDescription, pace: TransferPace, shaper: Shaper, server_cap_mbit: float
    ) -> BulkRoute:
        return BulkRoute(
            str(self._address),
            run,
            self._settings,
            pace,
            shaper,
            told_cap(server_cap_mbit),
            RunSpec.model_validate_json(run.run_spec_json).max_learners,
            self._closed,
            self._arrived,
            self._bulk_channel,
            self._see_generation,
        )

    def _arrived(self, num_bytes: int) -> None:
        with self._lock:
            self._arrived_bytes += num_bytes

    def _with_traffic(self, report: Report) -> Report:
        return replace(
            report,
            cap_up_mbit=self._up.cap_mbit or 0.0,
            cap_down_mbit=self._down.cap_mbit or 0.0,
            use_up_mbit=self._up.use_mbit,
            use_down_mbit=self._down.use_mbit,
        )

    def _bulk_channel(self, again: bool) -> grpc.Channel:
        """A server that was started anew may serve bulk elsewhere, so a retry asks again."""
        run = self._run
        if run is None or again:
            run = self._describe()
        place = Address(run.bulk_host or self._address.host, run.bulk_port)
        with self._lock:
            if self._closed.is_set():
                raise self._closed_error()
            before = self._bulk
            if before is not None and before[0] == place:
                return before[1]
            options = window_options(self._down.cap_mbit, streams=1)
            self._bulk = place, open_channel(place, options)
            channel = self._bulk[1]
        if before is not None:
            before[1].close()
        return channel

    def _tried(self, call: Callable[[Attempts], _Result]) -> _Result:
        def attempt(attempts: Attempts) -> _Result:
            return self._guarded(lambda: call(attempts))

        try:
            return retried(attempt, self._settings, self._closed)
        except (RefusedError, UnreachableError):
            raise
        except DilocoError as error:  # busy, damaged on its way, failed inside: later, perhaps
            raise UnreachableError(str(error)) from error

    def _guarded(self, call: Callable[[], _Result]) -> _Result:
        """Calls, on a link that is open; closing it meanwhile is an UnreachableError."""
        if self._closed.is_set():
            raise self._closed_error()
        try:
            return call()
        except ValueError as error:
            if self._closed.is_set():  # what gRPC raises for a closed channel
                raise self._closed_error() from error
            raise

    def _closed_error(self) -> UnreachableError:
        return UnreachableError(f"the link to {self._address} was closed")
