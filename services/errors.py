"""The one catalogue that ties the project's errors to gRPC status codes, and the two translators.

A server ends a refused call with a status and an `ErrorInfo` detail (domain diloco.v1) whose
reason names the refusal code or the kind of error, so that a client raises the very error that
the server raised. An error that is nobody's business outside (a path, a bug) becomes INTERNAL
with an incident number; what happened stands in the server's log under that number.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import NamedTuple, cast

import grpc
import structlog
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from fragments.errors import (
    BusyError,
    CheckpointError,
    DataError,
    DilocoError,
    ForbiddenError,
    LayoutError,
    NonFiniteError,
    PayloadError,
    RefusedError,
    RunDirectoryError,
    SettingsError,
    StorageError,
    UnreachableError,
)
from fragments.records import RefusalCode

_log = structlog.get_logger(__name__)

DOMAIN = "diloco.v1"


class OlderServerError(UnreachableError):
    """The server that answers was started before one that this process has already seen."""


class StreamReplacedError(DilocoError):
    """A newer control stream of the same lease took the place of this one."""


class Entry(NamedTuple):
    """How an error crosses the network; `public`: its sentence may be read by the caller."""

    status: grpc.StatusCode
    public: bool = True


REFUSALS: Mapping[RefusalCode, grpc.StatusCode] = {
    RefusalCode.FENCED: grpc.StatusCode.ABORTED,
    RefusalCode.LEASE_LOST: grpc.StatusCode.NOT_FOUND,
    RefusalCode.OLD_EPOCH: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.CONSUMED: grpc.StatusCode.ALREADY_EXISTS,
    RefusalCode.STALE: grpc.StatusCode.OUT_OF_RANGE,
    RefusalCode.BAD_PAYLOAD: grpc.StatusCode.DATA_LOSS,
    RefusalCode.MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalCode.NOT_TRAINING: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.EVICTED: grpc.StatusCode.PERMISSION_DENIED,
}

ERRORS: Mapping[type[DilocoError], Entry] = {
    LayoutError: Entry(grpc.StatusCode.INVALID_ARGUMENT),
    PayloadError: Entry(grpc.StatusCode.DATA_LOSS),
    NonFiniteError: Entry(grpc.StatusCode.INVALID_ARGUMENT),
    SettingsError: Entry(grpc.StatusCode.INVALID_ARGUMENT),
    BusyError: Entry(grpc.StatusCode.RESOURCE_EXHAUSTED),
    StorageError: Entry(grpc.StatusCode.RESOURCE_EXHAUSTED),
    ForbiddenError: Entry(grpc.StatusCode.PERMISSION_DENIED),
    UnreachableError: Entry(grpc.StatusCode.UNAVAILABLE),
    OlderServerError: Entry(grpc.StatusCode.UNAVAILABLE),
    StreamReplacedError: Entry(grpc.StatusCode.ABORTED),
    # Sentences with paths of the server's machine in them.
    RunDirectoryError: Entry(grpc.StatusCode.INTERNAL, public=False),
    CheckpointError: Entry(grpc.StatusCode.INTERNAL, public=False),
    DataError: Entry(grpc.StatusCode.INTERNAL, public=False),
    DilocoError: Entry(grpc.StatusCode.INTERNAL, public=False),
}
"""Every domain error but `RefusedError`, whose code decides. An error that is not here counts as
its nearest ancestor that is."""


def status_of(error: Exception) -> status_pb2.Status:
    """The status that tells a caller of `error`; logs what may not be told."""
    if isinstance(error, RefusedError):
        return _status(REFUSALS[error.code], error.code.name, str(error))
    ancestors = [kind for kind in type(error).__mro__ if kind in ERRORS]
    if ancestors and ERRORS[ancestors[0]].public:
        return _status(ERRORS[ancestors[0]].status, ancestors[0].__name__, str(error))
    incident = secrets.token_hex(4)
    _log.error("internal_error", incident=incident, exc_info=error)
    sentence = f"the server failed inside (incident {incident}): its log says why"
    return _status(grpc.StatusCode.INTERNAL, DilocoError.__name__, sentence)


MESSAGE_CHARS = 1024
"""Longest message of a status or a refusal."""


def _status(code: grpc.StatusCode, reason: str, message: str) -> status_pb2.Status:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    number: int = code.value[0]
    # A caller's own text may be part of it, and trailers have a hard limit.
    return status_pb2.Status(code=number, message=message[:MESSAGE_CHARS], details=[detail])


def end_call(context: grpc.ServicerContext, error: Exception) -> None:
    """Ends the call with the status of `error`. Raises, as gRPC wants it, to leave the handler."""
    context.abort_with_status(rpc_status.to_status(status_of(error)))


# What a status means that carries no detail of ours: from gRPC itself, or from a proxy.
# UNKNOWN is what a torn stream looks like; a server of ours never says it.
_BARE: Mapping[grpc.StatusCode, type[DilocoError]] = {
    grpc.StatusCode.UNAVAILABLE: UnreachableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: UnreachableError,
    grpc.StatusCode.CANCELLED: UnreachableError,
    grpc.StatusCode.UNKNOWN: UnreachableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: BusyError,
    grpc.StatusCode.DATA_LOSS: PayloadError,
}
_BY_NAME = {kind.__name__: kind for kind in ERRORS}


def error_of(error: grpc.RpcError, address: str, doing: str) -> DilocoError:
    """The domain error behind a failed call to `address`; `doing` names the call for people."""
    # Every RpcError that a stub raises is also the call itself, which the types do not say.
    call = cast("grpc.Call", error)
    code, message = call.code(), call.details() or ""
    reason = _reason(call)
    if reason in RefusalCode.__members__:
        return RefusedError(RefusalCode[reason], message)
    if reason in _BY_NAME:
        return _BY_NAME[reason](message)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        sentence = f"the server at {address} does not know {doing}: update the older of the two"
        return RefusedError(RefusalCode.MISMATCH, sentence)
    kind = _BARE.get(code, DilocoError)
    if kind is UnreachableError:
        return UnreachableError(_unreachable(address, doing, code, message))
    return kind(f"{doing} at {address} failed: {message or code.name.lower()}")


# What gRPC's sentences of some hundred letters come to, by what is in them; in full at debug.
_SIGNS = (
    ("Connection refused", "connection refused"),
    ("Connection reset", "the connection broke"),
    ("Socket closed", "the connection broke"),
    ("Broken pipe", "the connection broke"),
    ("keepalive", "nothing was heard any more"),
    ("ping timeout", "nothing was heard any more"),
    ("Connection timed out", "no answer"),
    ("FD Shutdown", "no answer"),
    ("No route to host", "no route to that host"),
    ("Network is unreachable", "that network is unreachable"),
    ("DNS", "its name cannot be resolved"),
)


def _unreachable(address: str, doing: str, code: grpc.StatusCode, message: str) -> str:
    late = code is grpc.StatusCode.DEADLINE_EXCEEDED
    if message:
        _log.debug("call_failed", doing=doing, code=code.name, details=message)
    why = next((word for sign, word in _SIGNS if sign in message), message or code.name)
    what = "did not answer in time" if late else f"cannot be reached ({why})"
    return (
        f"the outer server at {address} {what} ({doing}): check that `diloco serve` runs there, "
        "that the address is right, and that no firewall is in between"
    )


def _reason(call: grpc.Call) -> str:
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # the detail contradicts the status: not written by us
        return ""
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return str(info.reason)
    return ""
