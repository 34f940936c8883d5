"""ControlService: describing, joining, leaving, and the stream on which a learner is paced."""

# ruff: noqa: N802 (the contract names the methods)

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc

from diloco.v1 import control_pb2, control_pb2_grpc
from fragments.errors import RefusedError
from fragments.records import (
    PROTOCOL_VERSION,
    Adopted,
    Decline,
    Evaluation,
    Goodbye,
    Lease,
    RefusalCode,
    Report,
    RunDescription,
)
from services import translate
from services.errors import StreamReplacedError
from services.outer.port import OuterPort
from services.outer.streams import NoteQueue, OpenStreams
from services.settings import ServerSettings

STOPPING = Goodbye(None, "the server is stopping: train on, and come back when it is there")


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Control calls over an `OuterPort`.

    Args:
        bulk: port and host of the bulk server, once it is bound.
    """

    def __init__(
        self,
        outer: OuterPort,
        settings: ServerSettings,
        streams: OpenStreams,
        bulk: Callable[[], tuple[int, str]],
    ) -> None:
        self._outer = outer
        self._settings = settings
        self._streams = streams
        self._bulk = bulk

    def DescribeRun(
        self, request: control_pb2.DescribeRunRequest, context: grpc.ServicerContext
    ) -> control_pb2.DescribeRunResponse:
        """The run, with the place where bulk is served, and its caps."""
        if request.protocol_version not in (0, PROTOCOL_VERSION):
            raise RefusedError(
                RefusalCode.MISMATCH,
                f"this server speaks protocol {PROTOCOL_VERSION}, the caller "
                f"{request.protocol_version}: update the older program",
            )
        self._streams.visit()
        port, host = self._bulk()
        run: RunDescription = replace(
            self._outer.describe(),
            bulk_port=port,
            bulk_host=host,
            cap_receive_mbit=self._settings.cap_receive_mbit or 0.0,
            cap_send_mbit=self._settings.cap_send_mbit or 0.0,
        )
        return translate.description_to_wire(run)

    def Join(
        self, request: control_pb2.JoinRequest, context: grpc.ServicerContext
    ) -> control_pb2.JoinResponse:
        """Grants a lease or refuses."""
        return translate.welcome_to_wire(self._outer.join(translate.hello_from_wire(request)))

    def Leave(
        self, request: control_pb2.LeaveRequest, context: grpc.ServicerContext
    ) -> control_pb2.LeaveResponse:
        """Takes a lease back."""
        self._outer.leave(translate.lease_from_wire(request.lease), request.reason)
        return control_pb2.LeaveResponse()

    def Control(
        self,
        request_iterator: Iterator[control_pb2.ControlRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[control_pb2.ControlResponse]:
        """One stream: this thread writes what the queue gives, another reads what comes up."""
        lease = self._attached(request_iterator, context)
        queue = NoteQueue(self._settings.queued_notes)
        sink = queue.put  # one object, so that `detach` finds what `attach` was given
        if not context.add_callback(queue.end):
            return  # the call is over already
        with self._streams.opened(lambda: sink(STOPPING)):
            self._outer.attach(lease, sink)
            try:
                _Reader(self._outer, lease, request_iterator, queue).start()
                for note in queue:
                    yield translate.note_to_wire(note, self._outer.generation)
                    if isinstance(note, Goodbye):
                        self._end(note)
            finally:
                self._outer.detach(lease, sink)

    def _end(self, note: Goodbye) -> None:
        """Gives the stream the status that goes with its last note."""
        if note.code is not None:
            raise RefusedError(note.code, note.reason)
        if not self._streams.stopping:  # the one other end without a fault
            raise StreamReplacedError(note.reason)

    def _attached(
        self, requests: Iterator[control_pb2.ControlRequest], context: grpc.ServicerContext
    ) -> Lease:
        # A stream that never says who it is would hold its thread for ever.
        timer = threading.Timer(self._settings.attach_s, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            first = next(requests, None)
        finally:
            timer.cancel()
        lease = None if first is None else translate.learner_note_from_wire(first)
        if not isinstance(lease, Lease):
            raise RefusedError(
                RefusalCode.MISMATCH, "a control stream begins with `attach`: update this program"
            )
        return lease


class _Reader(threading.Thread):
    """Hands what a learner says to the outer server; its end, good or bad, ends the queue."""

    def __init__(
        self,
        outer: OuterPort,
        lease: Lease,
        requests: Iterator[control_pb2.ControlRequest],
        queue: NoteQueue,
    ) -> None:
        super().__init__(name=f"control-read-{lease.learner}", daemon=True)
        self._outer = outer
        self._lease = lease
        self._requests = requests
        self._queue = queue

    def run(self) -> None:
        try:
            for request in self._requests:
                self._hear(translate.learner_note_from_wire(request))
            self._queue.end()
        except RefusedError as error:
            self._queue.put(Goodbye(error.code, str(error)))
        except Exception as error:  # noqa: BLE001 (this thread's border: the writer tells the caller)
            self._queue.end(error)

    def _hear(self, note: translate.LearnerNote | None) -> None:
        match note:
            case Report():
                self._outer.report(self._lease, note)
            case Decline():
                self._outer.decline(self._lease, note)
            case Adopted():
                self._outer.adopted(self._lease, note)
            case Evaluation():
                self._outer.evaluated(self._lease, note)
            case Lease():
                raise RefusedError(RefusalCode.MISMATCH, "this control stream is attached already")
            case None:
                pass  # from a newer learner; the contract says to ignore it
