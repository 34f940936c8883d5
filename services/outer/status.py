"""StatusService: what a person or a dashboard asks."""

# ruff: noqa: N802 (the contract names the methods)

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace

import grpc

from diloco.v1 import status_pb2, status_pb2_grpc
from fragments.errors import SettingsError
from services import translate
from services.outer.port import OuterPort
from services.outer.streams import OpenStreams
from services.shaper import Shaper

MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 3600.0


class StatusServicer(status_pb2_grpc.StatusServiceServicer):
    """Snapshots of an `OuterPort`, with what the bulk server receives and sends."""

    def __init__(
        self, outer: OuterPort, streams: OpenStreams, received: Shaper, sent: Shaper
    ) -> None:
        self._outer = outer
        self._streams = streams
        self._received = received
        self._sent = sent

    def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> status_pb2.GetStatusResponse:
        """The run now."""
        return status_pb2.GetStatusResponse(status=self._status())

    def WatchStatus(
        self, request: status_pb2.WatchStatusRequest, context: grpc.ServicerContext
    ) -> Iterator[status_pb2.WatchStatusResponse]:
        """The run now and every `interval_s`, until the caller or the server stops."""
        if not math.isfinite(request.interval_s):
            raise SettingsError(f"interval_s is {request.interval_s}; it must be a number")
        interval_s = min(max(request.interval_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
        over = threading.Event()
        if not context.add_callback(over.set):
            return
        with self._streams.opened(over.set):
            while True:
                yield status_pb2.WatchStatusResponse(status=self._status())
                if over.wait(interval_s):
                    return

    def _status(self) -> status_pb2.RunStatus:
        received, sent = self._received, self._sent
        status = replace(
            self._outer.status(),
            cap_receive_mbit=received.cap_mbit or 0.0,
            cap_send_mbit=sent.cap_mbit or 0.0,
            use_receive_mbit=received.use_mbit,
            use_send_mbit=sent.use_mbit,
        )
        return translate.status_to_wire(status)
