"""A learner's end of a control stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

import grpc
import structlog

from diloco.v1 import control_pb2, control_pb2_grpc
from fragments.errors import DilocoError, RefusedError, UnreachableError
from fragments.records import Adopted, Decline, Evaluation, Goodbye, Lease, Report, ServerNote
from services import translate
from services.errors import error_of

CLOSE_WAIT_S = 2.0
"""Longest wait for the server to end a stream that was closed here."""

_log = structlog.get_logger(__name__)


class GrpcControlLine:
    """`learner.ports.ControlLine` over one stream.

    Bounded: of reports only the newest waits; when `limit` other messages wait, the server has
    stopped reading, and the stream is broken off so that the owner opens a new one.

    `stamped` puts what the link knows into a report, when that is sent.

    The stream itself has no deadline, since it lasts as long as the lease: keepalive ends it
    within 40 s of the server's last sign of life.
    """

    def __init__(
        self,
        stub: control_pb2_grpc.ControlServiceStub,
        address: str,
        see_generation: Callable[[int], None],
        lease: Lease,
        on_note: Callable[[ServerNote], None],
        on_closed: Callable[[], None],
        stamped: Callable[[Report], Report],
        limit: int,
    ) -> None:
        self._address = address
        self._see_generation = see_generation
        self._on_note = on_note
        self._on_closed = on_closed
        self._stamped = stamped
        self._limit = limit
        self._queue: deque[translate.LearnerNote] = deque([lease])
        self._report: Report | None = None
        self._changed = threading.Condition()
        self._over = False
        self._closed_here = False
        self._call = stub.Control(self._requests())
        self._reader = threading.Thread(
            target=self._read, name=f"control-{lease.learner}", daemon=True
        )
        self._reader.start()

    def report(self, report: Report) -> None:
        """Say where the learner is; replaces a report that is not sent yet."""
        with self._changed:
            self._report = report
            self._changed.notify()

    def decline(self, decline: Decline) -> None:
        """Answer an ask with nothing."""
        self._send(decline)

    def adopted(self, adopted: Adopted) -> None:
        """Say that a version is trained on."""
        self._send(adopted)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Report a held-out loss."""
        self._send(evaluation)

    def close(self) -> None:
        """End the stream once the server has heard what is queued; `on_closed` is not called.

        Waits at most CLOSE_WAIT_S: what was said last (an adoption) would otherwise be overtaken
        by the call that gives the lease back.
        """
        with self._changed:
            self._closed_here = True
            self._over = True
            self._changed.notify()
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSE_WAIT_S)

    def _send(self, note: translate.LearnerNote) -> None:
        with self._changed:
            if self._over:
                return
            self._queue.append(note)
            self._changed.notify()
            full = len(self._queue) > self._limit
        if full:
            _log.warning("control_stream_stuck", address=self._address, queued=self._limit)
            self._break_off()

    def _break_off(self) -> None:
        with self._changed:
            self._over = True
            self._queue.clear()
            self._report = None
            self._changed.notify()
        self._call.cancel()

    def _requests(self) -> Iterator[control_pb2.ControlRequest]:
        """Runs on gRPC's thread of this call; what is queued at `close` is still sent."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._report or self._over)
                if self._queue:
                    note = self._queue.popleft()
                elif self._report is not None:
                    note, self._report = self._stamped(self._report), None
                else:
                    return
            yield translate.learner_note_to_wire(note)

    def _read(self) -> None:
        told = False
        try:
            for response in self._call:
                self._see_generation(response.generation)
                note = translate.note_from_wire(response)
                if note is not None:
                    told = isinstance(note, Goodbye)
                    self._on_note(note)
        except grpc.RpcError as error:
            failure = error_of(error, self._address, "the control stream")
            # That the server cannot be reached is for the owner to say, once and not at each try.
            log = _log.debug if isinstance(failure, UnreachableError) else _log.info
            log("control_stream_ended", reason=str(failure))
            if isinstance(failure, RefusedError) and not told:
                self._on_note(Goodbye(failure.code, str(failure)))
        except DilocoError as error:
            _log.warning("control_stream_ended", reason=str(error))
        finally:
            self._break_off()
            if not self._closed_here:
                self._on_closed()
