"""Whether a process of the project is well, by the standard gRPC health service.

Apart from `services.client`, which needs seven times the processor time to import: a health check
is a process of its own, every few seconds.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fragments.errors import UnreachableError
from services.security import parse_address

# A proxy of the environment would be asked even for loopback.
_OPTIONS = (("grpc.enable_http_proxy", 0),)


def is_serving(address: str, timeout_s: float = 5.0) -> bool:
    """Does the process at `address` (HOST:PORT of control, or of an admin port) say SERVING?

    Raises UnreachableError when nobody answers in time, SettingsError for a malformed address.
    """
    target = parse_address(address)
    with grpc.insecure_channel(str(target), options=_OPTIONS) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs name no method
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise UnreachableError(
                f"no health service answers at {target}: nothing of ours listens there, or it"
                f" does not answer within {timeout_s:g} s"
            ) from error
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
