"""PullService: global weights down, in chunks, resumable."""

# ruff: noqa: N802 (the contract names the methods)

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc

from diloco.v1 import common_pb2, pull_pb2, pull_pb2_grpc
from fragments.chunks import split
from fragments.errors import SettingsError
from fragments.records import Update
from services import translate
from services.outer.checks import RunIdentity, check_deadline
from services.outer.patience import Patience
from services.outer.port import OuterPort
from services.settings import ServerSettings
from services.shaper import Shaper, chunk_bytes

LEAST_CHUNK_BYTES = 1 << 10
"""A caller gets none that are smaller: each costs a message."""


class PullServicer(pull_pb2_grpc.PullServiceServicer):
    """Pulls from an `OuterPort`.

    The payloads are shared by all readers and cut as they go, so a reader costs one chunk, and a
    slow one costs its own thread and nothing else: no lock is held while it reads. All that is
    sent passes `sent`, by turns of a chunk.
    """

    def __init__(self, outer: OuterPort, settings: ServerSettings, sent: Shaper) -> None:
        self._outer = outer
        self._sent = sent
        self._run = RunIdentity.of(outer)
        self._chunk_bytes = chunk_bytes(settings.chunk_bytes, sent.cap_mbit)
        self._idle_s = settings.idle_s

    def Pull(
        self, request: pull_pb2.PullRequest, context: grpc.ServicerContext
    ) -> Iterator[pull_pb2.PullResponse]:
        """Each update's header, then its chunks."""
        check_deadline(context)
        self._run.check(request.run_id, request.layout_digest)
        lease = translate.lease_from_wire(request.lease)
        have = translate.version_from_wire(request.have) if request.HasField("have") else None
        updates = self._outer.updates(lease, request.fragment, have)
        self._outer.count_bytes(lease.learner, request.ByteSize(), 0)
        over = threading.Event()
        if not context.add_callback(over.set):
            return  # the call is over already
        with Patience(context, self._idle_s) as patience:
            for message in self._messages(updates, request):
                size = message.ByteSize()
                with patience.holding():
                    self._sent.wait(size, over)
                self._sent.count(size)
                self._outer.count_bytes(lease.learner, 0, size)
                yield message
                patience.touch()

    def _messages(
        self, updates: tuple[Update, ...], request: pull_pb2.PullRequest
    ) -> Iterator[pull_pb2.PullResponse]:
        size = self._chunk_bytes
        if request.chunk_bytes:
            size = min(size, max(LEAST_CHUNK_BYTES, request.chunk_bytes))
        for update in updates:
            offset = _resume_offset(update, request)
            header = translate.update_to_wire(update, self._outer.generation)
            yield pull_pb2.PullResponse(update=header)
            for chunk in split(update.payload.data, size, offset):
                wire = common_pb2.Chunk(offset=chunk.offset, data=chunk.data)
                yield pull_pb2.PullResponse(chunk=wire)


def _resume_offset(update: Update, request: pull_pb2.PullRequest) -> int:
    """Where to go on within this update: at 0, unless the caller has a part of it."""
    if not request.HasField("resume_version"):
        return 0
    if translate.version_from_wire(request.resume_version) != update.version:
        return 0
    size = len(update.payload.data)
    if request.resume_offset > size:
        raise SettingsError(f"cannot go on at byte {request.resume_offset} of {size}: start at 0")
    return request.resume_offset
