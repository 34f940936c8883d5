"""The two gRPC servers of an outer server: control and bulk, in one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import grpc
import structlog
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from diloco.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    pull_pb2,
    pull_pb2_grpc,
    push_pb2,
    push_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)
from fragments.errors import SettingsError
from fragments.records import Phase
from fragments.runspec import RunSpec
from services.calls import CallPool, CallPools
from services.health import HealthBoard
from services.listen import SERVER_OPTIONS, bind
from services.outer.admin import AdminServicer
from services.outer.control import ControlServicer
from services.outer.port import AdminPort, OuterPort
from services.outer.pull import PullServicer
from services.outer.push import PushServicer
from services.outer.status import StatusServicer
from services.outer.streams import OpenStreams
from services.security import Address, check_bind
from services.settings import ServerSettings
from services.shaper import Shaper, window_options

_log = structlog.get_logger(__name__)

_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_CONTROL = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
_STATUS = status_pb2.DESCRIPTOR.services_by_name["StatusService"].full_name
_PUSH = push_pb2.DESCRIPTOR.services_by_name["PushService"].full_name
_PULL = pull_pb2.DESCRIPTOR.services_by_name["PullService"].full_name

SPARE_STREAMS = 16
"""Control streams beyond two a learner: evaluators, and old streams that are not yet known dead."""


class Ports(NamedTuple):
    """Where the two servers listen."""

    control: int
    bulk: int


class OuterServices:
    """Serves an `OuterPort`, and what an operator may do to it, until stopped.

    Every concern has its own threads, so that a full link, a slow reader or many control streams
    starve neither status nor health.
    """

    def __init__(
        self, outer: OuterPort, settings: ServerSettings, admin: AdminPort | None = None
    ) -> None:
        """Binds nothing yet. SettingsError for an address that may not be served."""
        self._outer = outer
        self._admin = admin
        self._settings = settings
        self._address = check_bind(settings.address, settings.insecure)
        self._streams = OpenStreams()
        self._received = Shaper(settings.cap_receive_mbit)
        self._sent = Shaper(settings.cap_send_mbit)
        self._ports = Ports(0, 0)
        self._stopping = threading.Event()
        self._showing = threading.Lock()
        self._pulse = threading.Thread(target=self._watch_health, name="health", daemon=True)
        self._pools: list[CallPools] = []
        self._boards = (HealthBoard((_CONTROL, _STATUS)), HealthBoard((_PUSH, _PULL)))
        self._control = self._control_server()
        self._bulk = self._bulk_server()

    @property
    def ports(self) -> Ports:
        """The ports that are served; 0 before `start`."""
        return self._ports

    @property
    def address(self) -> Address:
        """The control address that is served."""
        return Address(self._address.host, self._ports.control)

    @property
    def open_streams(self) -> int:
        """Who is there: the control streams of learners and evaluators, and watchers."""
        return self._streams.count

    @property
    def visits(self) -> int:
        """How often a learner or an evaluator has asked what is served here; it only grows."""
        return self._streams.visits

    def start(self) -> None:
        """Binds both ports and serves; SettingsError, and nothing, when one cannot be had."""
        host = self._address.host
        bulk = bind(self._bulk, Address(host, self._settings.bulk_port))
        try:
            control = bind(self._control, self._address)
        except SettingsError:
            # A server that never ran keeps its port. Nobody can hold a lease yet, so what bulk
            # would answer in this moment are refusals.
            self._bulk.start()
            self.stop(grace_s=0)
            raise
        self._ports = Ports(control, bulk)
        self._bulk.start()
        self._control.start()
        self._pulse.start()
        _log.info("serving", control=str(Address(host, control)), bulk=str(Address(host, bulk)))

    def stop(self, grace_s: float = 2.0) -> None:
        """Says NOT_SERVING and a `Goodbye` on each stream, gives calls `grace_s`; idempotent."""
        self._stopping.set()
        self._show_health(serving=False)
        self._streams.end_all()
        for over in [server.stop(grace_s) for server in (self._control, self._bulk)]:
            over.wait()
        for pools in self._pools:
            pools.shutdown()
        if self._pulse.is_alive():
            self._pulse.join(grace_s + 1.0)

    def _control_server(self) -> grpc.Server:
        streams = 2 * self._max_learners() + SPARE_STREAMS
        queued = self._settings.queued_calls
        server = self._server(
            {
                f"/{_CONTROL}": CallPool("control", 4, queued),
                f"/{_CONTROL}/Control": CallPool("control stream", streams, 0),
                f"/{_STATUS}": CallPool("status", 2, queued),
                f"/{_STATUS}/WatchStatus": CallPool("watch", self._settings.watch_threads, 0),
                f"/{_ADMIN}": CallPool("admin", 2, 8),
                f"/{reflection.SERVICE_NAME}": CallPool("reflection", 4, 0),
            },
            self._boards[0],
        )
        control = ControlServicer(self._outer, self._settings, self._streams, self._bulk_place)
        control_pb2_grpc.add_ControlServiceServicer_to_server(control, server)
        status_pb2_grpc.add_StatusServiceServicer_to_server(
            StatusServicer(self._outer, self._streams, self._received, self._sent), server
        )
        names = [_CONTROL, _STATUS, health.SERVICE_NAME, reflection.SERVICE_NAME]
        if self._admin is not None:
            admin = AdminServicer(self._admin, self._settings)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
            names.append(_ADMIN)
        reflection.enable_server_reflection(names, server)
        return server

    def _max_learners(self) -> int:
        return RunSpec.model_validate_json(self._outer.describe().run_spec_json).max_learners

    def _bulk_server(self) -> grpc.Server:
        settings, queued = self._settings, self._settings.queued_calls
        # A push each: a slow upload must not hold back a fast one, whose deadline is running.
        learners = self._max_learners()
        pushes = max(settings.push_threads, learners)
        server = self._server(
            {
                f"/{_PUSH}": CallPool("push", pushes, queued),
                f"/{_PUSH}/GetPushOffset": CallPool("push offset", 2, queued),
                f"/{_PULL}": CallPool("pull", settings.pull_threads, queued),
            },
            self._boards[1],
            window_options(settings.cap_receive_mbit, streams=learners),
        )
        push = PushServicer(self._outer, settings, self._received)
        push_pb2_grpc.add_PushServiceServicer_to_server(push, server)
        pull = PullServicer(self._outer, settings, self._sent)
        pull_pb2_grpc.add_PullServiceServicer_to_server(pull, server)
        return server

    def _server(
        self,
        pools: dict[str, CallPool],
        board: HealthBoard,
        options: Sequence[tuple[str, int]] = (),
    ) -> grpc.Server:
        together = CallPools({**pools, **board.pools})
        self._pools.append(together)
        server = together.server((*SERVER_OPTIONS, *options))
        board.register(server)
        return server

    def _bulk_place(self) -> tuple[int, str]:
        port = self._settings.advertise_port or self._ports.bulk
        return port, self._settings.advertise

    def _watch_health(self) -> None:
        while not self._stopping.is_set():
            self._show_health(serving=self._is_well())
            self._stopping.wait(self._settings.pulse_s)

    def _show_health(self, *, serving: bool) -> None:
        with self._showing:  # a look from before a stop must not be shown after it
            for board in self._boards:
                board.show(serving=serving and not self._stopping.is_set())

    def _is_well(self) -> bool:
        try:
            return self._outer.status().phase is not Phase.DRAINING
        except Exception as error:  # noqa: BLE001 (without a status, for whatever reason, it is not well)
            if self._boards[0].serving:
                _log.error("not_serving", reason=str(error), exc_info=error)
            return False
