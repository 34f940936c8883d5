"""Binding a gRPC server to a port, with the options that all servers of the project share."""

from __future__ import annotations

import errno
import socket

import grpc

from fragments.errors import SettingsError
from services.security import Address
from services.settings import MESSAGE_BYTES

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # By default a second server on a used port starts silently beside the first.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # Clients of ours ping every 30 s, also without calls; a server that allows less than that
    # ends the connection with GOAWAY too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # The server pings too, so that a peer that vanished gives its threads back.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


def bind(server: grpc.Server, address: Address) -> int:
    """Binds and returns the port, which is a free one for port 0. SettingsError says why not."""
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise SettingsError(_why_unbound(address)) from error
    if port == 0:
        raise SettingsError(_why_unbound(address))
    return port


def _why_unbound(address: Address) -> str:
    """gRPC does not tell why it cannot bind; the socket itself does."""
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address.host, address.port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"{address} is in use: stop what listens there, or choose another port"
        return f"cannot listen on {address}: {error.strerror or error}"
    return f"cannot listen on {address}: it was in use a moment ago; try again"
