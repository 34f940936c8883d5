"""What an operator asks of a run. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from diloco.v1 import admin_pb2, admin_pb2_grpc
from fragments.records import Answered
from services.client.channel import open_channel
from services.errors import error_of
from services.security import parse_address

CALL_S = 60.0
"""Deadline of a call: a busy disk may take its time with what must be durable."""

LONG_CALL_S = 3600.0
"""Deadline of one that reads or writes a snapshot of the whole model."""

Stub = admin_pb2_grpc.AdminServiceStub


class AdminClient:
    """`diloco admin` at `address` (HOST:PORT of control). Every call may be repeated.

    Raises SettingsError for what cannot be done and a malformed address, ForbiddenError where this
    machine may not, UnreachableError when nothing answers in time, BusyError and StorageError for
    what cannot be done now.
    """

    def __init__(self, address: str) -> None:
        self._address = parse_address(address)

    def drain(self, reason: str) -> Answered:
        """Open no more rounds until `release`."""
        request = admin_pb2.DrainRequest(reason=reason)
        return self._call(lambda stub: stub.Drain(request, timeout=CALL_S))

    def stop(self, reason: str) -> Answered:
        """Have the server write a last snapshot and end."""
        request = admin_pb2.StopRequest(reason=reason)
        return self._call(lambda stub: stub.Stop(request, timeout=CALL_S))

    def evict(
        self, learner: str, reason: str, for_s: float | None = None, *, drop: bool = False
    ) -> Answered:
        """End a name's lease and grant it no other until `release`, or for a time."""
        request = admin_pb2.EvictRequest(
            learner=learner, reason=reason, for_s=for_s or 0.0, drop=drop
        )
        return self._call(lambda stub: stub.Evict(request, timeout=CALL_S))

    def release(self, learner: str | None, reason: str) -> Answered:
        """Undo `evict` for a name, or `drain` where there is none."""
        request = admin_pb2.ReleaseRequest(learner=learner or "", reason=reason)
        return self._call(lambda stub: stub.Release(request, timeout=CALL_S))

    def change(self, changes: Sequence[tuple[str, str]], reason: str) -> Answered:
        """Change settings of the run, all or none."""
        settings = [admin_pb2.Setting(key=key, value=value) for key, value in changes]
        request = admin_pb2.SetRequest(settings=settings, reason=reason)
        return self._call(lambda stub: stub.Set(request, timeout=CALL_S))

    def roll_back(
        self, reason: str, snapshot: str = "", up_to_version: int | None = None
    ) -> Answered:
        """Go back to a snapshot, by name, or to the newest up to a version."""
        request = admin_pb2.RollbackRequest(
            snapshot=snapshot, up_to_version=up_to_version, reason=reason
        )
        return self._call(lambda stub: stub.Rollback(request, timeout=LONG_CALL_S))

    def snapshot(self) -> Answered:
        """Write a snapshot; returns once it is durable."""
        request = admin_pb2.TakeSnapshotRequest()
        return self._call(lambda stub: stub.TakeSnapshot(request, timeout=LONG_CALL_S))

    def _call(self, call: Callable[[Stub], Any]) -> Answered:
        """One try: who asks sees what comes of it, and may ask again."""
        with open_channel(self._address) as channel:
            try:
                answer: admin_pb2.Answer = call(Stub(channel)).answer
            except grpc.RpcError as error:
                raise error_of(error, str(self._address), "diloco admin") from error
        return Answered(answer.sentence, answer.changed, answer.snapshot)
