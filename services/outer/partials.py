"""Pushes that are not complete: what a broken call leaves, so that the next one goes on there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fragments.chunks import Assembler
from fragments.errors import BusyError, PayloadError
from fragments.records import ContributionKey


@dataclass(frozen=True, slots=True)
class UploadId:
    """Two uploads are the same when all of this is."""

    key: ContributionKey
    codec: str
    wire_bytes: int
    raw_bytes: int
    crc32c: int


class Receiver:
    """An upload in the hands of one call."""

    upload: Upload
    finished = False

    def append(self, offset: int, data: bytes) -> None:
        """Takes a chunk. PayloadError for a wrong one; BusyError once another call took over."""
        self.upload.append(self, offset, data)

    def finish(self) -> bytes:
        """All bytes, which are given out once. PayloadError while some are missing."""
        data = self.upload.finish(self)
        self.finished = True
        return data


class Upload:
    """What is here of one payload. Only its owner may add to it; a later call takes it over."""

    def __init__(self, identity: UploadId, assembler: Assembler, owner: Receiver) -> None:
        self.identity = identity
        self.owner: Receiver | None = owner
        self.idle_since_s = 0.0
        self._assembler = assembler
        self._lock = threading.Lock()

    @property
    def received(self) -> int:
        """Bytes here so far."""
        return self._assembler.received

    def append(self, owner: Receiver, offset: int, data: bytes) -> None:
        """Takes a chunk of `owner`."""
        with self._lock:
            self._check(owner)
            self._assembler.append(offset, data)

    def finish(self, owner: Receiver) -> bytes:
        """All bytes."""
        with self._lock:
            self._check(owner)
            return self._assembler.finish()

    def take_over(self, owner: Receiver | None) -> None:
        """From here on only `owner` may append."""
        with self._lock:
            self.owner = owner

    def _check(self, owner: Receiver) -> None:
        if self.owner is not owner:
            raise BusyError("another call of this push took over")


class PartialUploads:
    """All uploads that are not complete. Thread-safe.

    Bounds: one idle upload a learner, each for `max_age_s` since its call broke; declared sizes
    of all, active ones included, sum up to at most `max_bytes`. At the bound the oldest idle one
    is dropped, and with none to drop the push is refused with BusyError: come back later.
    """

    def __init__(self, max_bytes: int, max_age_s: float, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._uploads: dict[UploadId, Upload] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._uploads)

    def received(self, identity: UploadId) -> int:
        """Bytes of this upload that are here; 0 where none are."""
        with self._lock:
            self._drop_old()
            upload = self._uploads.get(identity)
            return 0 if upload is None else upload.received

    @contextmanager
    def receiving(self, identity: UploadId, offset: int, limit: int) -> Iterator[Receiver]:
        """Holds the upload for one call, which goes on at `offset`.

        What arrived is kept for a later call unless `finish` gave it out. Raises PayloadError
        where `offset` is not what is here or the size passes `limit`, BusyError at the bound.
        """
        receiver = Receiver()
        receiver.upload = self._open(identity, offset, limit, receiver)
        try:
            yield receiver
        finally:
            self._close(receiver)

    def _open(self, identity: UploadId, offset: int, limit: int, owner: Receiver) -> Upload:
        with self._lock:
            self._drop_old()
            upload = self._uploads.get(identity)
            if upload is not None and offset == upload.received:
                upload.take_over(owner)
                return upload
            if offset != 0:
                held = 0 if upload is None else upload.received
                raise PayloadError(
                    f"the push goes on at byte {offset}, but {held} are here: ask for the offset"
                )
            if upload is not None:  # the caller starts over
                upload.take_over(None)
                del self._uploads[identity]
            fresh = Upload(identity, Assembler(identity.wire_bytes, limit), owner)
            self._make_room(identity.wire_bytes)
            self._uploads[identity] = fresh
            return fresh

    def _close(self, receiver: Receiver) -> None:
        upload = receiver.upload
        with self._lock:
            if upload.owner is not receiver:
                return
            del self._uploads[upload.identity]
            if receiver.finished or upload.received == 0:
                return
            learner = upload.identity.key.learner
            for other in self._idle():
                if other.identity.key.learner == learner:
                    del self._uploads[other.identity]
            upload.take_over(None)
            upload.idle_since_s = self._clock()
            self._uploads[upload.identity] = upload

    def _idle(self) -> list[Upload]:
        idle = [upload for upload in self._uploads.values() if upload.owner is None]
        return sorted(idle, key=lambda upload: upload.idle_since_s)

    def _drop_old(self) -> None:
        now_s = self._clock()
        for upload in self._idle():
            if now_s - upload.idle_since_s > self._max_age_s:
                del self._uploads[upload.identity]

    def _make_room(self, wire_bytes: int) -> None:
        free = self._max_bytes - sum(identity.wire_bytes for identity in self._uploads)
        for upload in self._idle():
            if free >= wire_bytes:
                break
            free += upload.identity.wire_bytes
            del self._uploads[upload.identity]
        if free < wire_bytes:
            raise BusyError(
                f"{self._max_bytes - free} bytes of pushes are under way and {self._max_bytes} "
                f"are the bound: a push of {wire_bytes} must come later"
            )
