"""Health on every server of the project, and the admin server that learners have for it."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.calls import CallPool, CallPools
from services.listen import SERVER_OPTIONS, bind
from services.security import Address

WATCHERS = 16
"""Watchers of one server's health at once; each holds a thread."""


class HealthBoard:
    """The health service of one gRPC server, by service name; "" is the server as a whole.

    Watch is served in its blocking form, from a pool of its own (`pools`). The other form holds a
    lock while it waits for the one thread of gRPC, which waits for that lock when a watcher
    leaves at that moment, and then the server answers nothing any more (grpc_health 1.81).
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._names = ("", *services)
        self._servicer = health.HealthServicer(experimental_non_blocking=False)
        self.pools = {
            f"/{health.SERVICE_NAME}": CallPool("health", 2, 256),
            f"/{health.SERVICE_NAME}/Watch": CallPool("health watch", WATCHERS, 0),
        }
        self._serving: bool | None = None
        self.show(serving=False)

    @property
    def serving(self) -> bool:
        """What is shown now."""
        return bool(self._serving)

    def register(self, server: grpc.Server) -> None:
        """Adds the service to a server that is not started yet."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def show(self, *, serving: bool) -> None:
        """SERVING or NOT_SERVING for every name; watchers hear of a change only."""
        if serving == self._serving:
            return
        self._serving = serving
        kinds = health_pb2.HealthCheckResponse
        for name in self._names:
            self._servicer.set(name, kinds.SERVING if serving else kinds.NOT_SERVING)


class AdminHealth:
    """Health of a learner or evaluator on a port of its own, loopback by default.

    It says NOT_SERVING until `serving` is set. SettingsError where the port cannot be had.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._board = HealthBoard(())
        self._pools = CallPools(self._board.pools)
        self._server = self._pools.server(SERVER_OPTIONS)
        self._board.register(self._server)
        self._serving = False
        self.address = Address(host, bind(self._server, Address(host, port)))
        self._server.start()

    @property
    def port(self) -> int:
        """The port that is served."""
        return self.address.port

    @property
    def serving(self) -> bool:
        """Whether the process says that it is well."""
        return self._serving

    @serving.setter
    def serving(self, value: bool) -> None:
        self._serving = value
        self._board.show(serving=value)

    def stop(self, grace_s: float = 0.5) -> None:
        """Ends the server; idempotent."""
        self.serving = False
        self._server.stop(grace_s).wait()
        self._pools.shutdown()
