"""The status of a run, for a person or a dashboard. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from diloco.v1 import status_pb2, status_pb2_grpc
from fragments.records import RunStatus
from services import translate
from services.client.channel import open_channel
from services.errors import error_of
from services.security import parse_address

WATCH_DEADLINE_S = 7 * 24 * 3600.0


def fetch_status(address: str, timeout_s: float = 5.0) -> RunStatus:
    """The run at `address` (HOST:PORT of control) now.

    Raises UnreachableError when nothing answers in time, SettingsError for a malformed address.
    """
    target = parse_address(address)
    with open_channel(target) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        try:
            answer = stub.GetStatus(status_pb2.GetStatusRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, str(target), "asking for the status") from error
    return translate.status_from_wire(answer.status)


def watch_status(address: str, interval_s: float = 1.0) -> Iterator[RunStatus]:
    """The run now and every `interval_s` (at least 0.1) seconds.

    Ends when the server stops. Raises UnreachableError when it cannot be reached or goes away
    without a word, BusyError when too many watch already. Closing the iterator ends the call.
    """
    target = parse_address(address)
    request = status_pb2.WatchStatusRequest(interval_s=interval_s)
    with open_channel(target) as channel:
        call = status_pb2_grpc.StatusServiceStub(channel).WatchStatus(
            request, timeout=WATCH_DEADLINE_S
        )
        try:
            for answer in call:
                yield translate.status_from_wire(answer.status)
        except grpc.RpcError as error:
            raise error_of(error, str(target), "watching the status") from error
