"""Channels to an outer server."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from services.security import Address
from services.settings import MESSAGE_BYTES

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # Ping every 30 s, with and without calls, and give a silent server 10 s. The server allows a
    # ping every 10 s (services.listen): more often is answered with GOAWAY too_many_pings.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # A proxy of the environment would be asked even for loopback.
    ("grpc.enable_http_proxy", 0),
    # Retries are `services.client.retry`'s, with resume; two layers of them would multiply.
    ("grpc.enable_retries", 0),
    # Control and bulk, and two links in one process, each have a connection of their own.
    ("grpc.use_local_subchannel_pool", 1),
    # A server that comes back is found within seconds; the default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def open_channel(address: Address, options: Sequence[tuple[str, int]] = ()) -> grpc.Channel:
    """A plaintext channel, not yet connected; the caller closes it."""
    return grpc.insecure_channel(str(address), options=(*CHANNEL_OPTIONS, *options))
