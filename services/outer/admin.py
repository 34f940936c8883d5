"""AdminService: what an operator does to a run, for those who may."""

# ruff: noqa: N802 (the contract names the methods)

from __future__ import annotations

import grpc

from diloco.v1 import admin_pb2, admin_pb2_grpc
from fragments.errors import ForbiddenError, SettingsError
from fragments.records import Answered
from services.outer.port import AdminPort
from services.security import is_near
from services.settings import ServerSettings

MAX_SETTINGS = 64
"""More settings than this are not changed by one call of ours."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Calls over an `AdminPort`, from where `ServerSettings.admin_from` says."""

    def __init__(self, admin: AdminPort, settings: ServerSettings) -> None:
        self._admin = admin
        self._from = settings.admin_from

    def Drain(
        self, request: admin_pb2.DrainRequest, context: grpc.ServicerContext
    ) -> admin_pb2.DrainResponse:
        """Opens no more rounds."""
        self._check(context)
        return admin_pb2.DrainResponse(answer=_wire(self._admin.drain(request.reason)))

    def Stop(
        self, request: admin_pb2.StopRequest, context: grpc.ServicerContext
    ) -> admin_pb2.StopResponse:
        """Ends the server."""
        self._check(context)
        return admin_pb2.StopResponse(answer=_wire(self._admin.stop(request.reason)))

    def Evict(
        self, request: admin_pb2.EvictRequest, context: grpc.ServicerContext
    ) -> admin_pb2.EvictResponse:
        """Ends a lease and grants no other."""
        self._check(context)
        answered = self._admin.evict(
            request.learner, request.reason, request.for_s or None, drop=request.drop
        )
        return admin_pb2.EvictResponse(answer=_wire(answered))

    def Release(
        self, request: admin_pb2.ReleaseRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ReleaseResponse:
        """Undoes Drain or Evict."""
        self._check(context)
        answered = self._admin.release(request.learner or None, request.reason)
        return admin_pb2.ReleaseResponse(answer=_wire(answered))

    def Set(
        self, request: admin_pb2.SetRequest, context: grpc.ServicerContext
    ) -> admin_pb2.SetResponse:
        """Changes settings of the run."""
        self._check(context)
        if not 1 <= len(request.settings) <= MAX_SETTINGS:
            raise SettingsError(f"between 1 and {MAX_SETTINGS} settings are changed at once")
        changes = tuple((setting.key, setting.value) for setting in request.settings)
        answered = self._admin.change(changes, request.reason)
        return admin_pb2.SetResponse(answer=_wire(answered))

    def Rollback(
        self, request: admin_pb2.RollbackRequest, context: grpc.ServicerContext
    ) -> admin_pb2.RollbackResponse:
        """Goes back to a snapshot."""
        self._check(context)
        most = request.up_to_version if request.HasField("up_to_version") else None
        answered = self._admin.roll_back(request.snapshot, most, request.reason)
        return admin_pb2.RollbackResponse(answer=_wire(answered))

    def TakeSnapshot(
        self, request: admin_pb2.TakeSnapshotRequest, context: grpc.ServicerContext
    ) -> admin_pb2.TakeSnapshotResponse:
        """Writes a snapshot."""
        self._check(context)
        return admin_pb2.TakeSnapshotResponse(answer=_wire(self._admin.snapshot()))

    def _check(self, context: grpc.ServicerContext) -> None:
        if self._from == "anywhere" or (self._from == "loopback" and is_near(context.peer())):
            return
        where = "on the server's own machine" if self._from == "loopback" else "nowhere"
        raise ForbiddenError(
            f"`diloco admin` may be used {where}: whoever starts the server says so with "
            "--admin-from"
        )


def _wire(answered: Answered) -> admin_pb2.Answer:
    return admin_pb2.Answer(
        sentence=answered.sentence, changed=answered.changed, snapshot=answered.snapshot
    )
