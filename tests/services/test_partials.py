from __future__ import annotations

import contextlib

import pytest

from fragments.errors import BusyError, PayloadError
from fragments.records import ContributionKey, Version
from services.outer.partials import PartialUploads, UploadId

LIMIT = 1000


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def upload(learner: str = "eu", fragment: int = 0, size: int = 100, crc: int = 1) -> UploadId:
    return UploadId(ContributionKey(learner, fragment, Version(1, 0)), "c", size, size, crc)


def leave(uploads: PartialUploads, identity: UploadId, received: int) -> None:
    """A call that broke after `received` bytes."""
    with (
        contextlib.suppress(ConnectionError),
        uploads.receiving(identity, 0, LIMIT) as receiver,
    ):
        receiver.append(0, b"x" * received)
        raise ConnectionError


def test_one_idle_upload_a_learner() -> None:
    uploads = PartialUploads(LIMIT, 60, Clock())
    leave(uploads, upload(fragment=0), 10)
    leave(uploads, upload("us"), 30)
    leave(uploads, upload(fragment=1), 20)
    assert uploads.received(upload(fragment=0)) == 0
    assert uploads.received(upload(fragment=1)) == 20
    assert uploads.received(upload("us")) == 30
    assert len(uploads) == 2


def test_another_payload_of_the_same_key_shares_nothing() -> None:
    uploads = PartialUploads(LIMIT, 60, Clock())
    leave(uploads, upload(crc=1), 10)
    assert uploads.received(upload(crc=2)) == 0
    with pytest.raises(PayloadError, match="0 are here"):
        leave_at(uploads, upload(crc=2), 10)


def leave_at(uploads: PartialUploads, identity: UploadId, offset: int) -> None:
    with uploads.receiving(identity, offset, LIMIT):
        pass


def test_an_idle_upload_grows_old() -> None:
    clock = Clock()
    uploads = PartialUploads(LIMIT, 60, clock)
    leave(uploads, upload(), 10)
    clock.now_s = 60
    assert uploads.received(upload()) == 10
    clock.now_s = 60.1
    assert uploads.received(upload()) == 0
    assert len(uploads) == 0


def test_the_oldest_idle_upload_makes_room_and_active_ones_do_not() -> None:
    clock = Clock()
    uploads = PartialUploads(250, 60, clock)
    for clock.now_s, learner in enumerate(("a", "b")):
        leave(uploads, upload(learner), 10)
    with uploads.receiving(upload("c"), 0, LIMIT):
        assert uploads.received(upload("a")) == 0
        assert uploads.received(upload("b")) == 10
        with uploads.receiving(upload("d"), 0, LIMIT):
            assert uploads.received(upload("b")) == 0
            with (
                pytest.raises(BusyError, match="200 bytes of pushes are under way and 250"),
                uploads.receiving(upload("e"), 0, LIMIT),
            ):
                pass
    assert len(uploads) == 0


def test_nothing_is_kept_of_a_push_that_was_given_out_or_never_began() -> None:
    uploads = PartialUploads(LIMIT, 60, Clock())
    with uploads.receiving(upload(size=3), 0, LIMIT) as receiver:
        receiver.append(0, b"abc")
        assert receiver.finish() == b"abc"
    with uploads.receiving(upload(), 0, LIMIT):
        pass
    assert len(uploads) == 0


def test_starting_over_drops_what_was_here() -> None:
    uploads = PartialUploads(LIMIT, 60, Clock())
    leave(uploads, upload(size=3), 2)
    with uploads.receiving(upload(size=3), 0, LIMIT) as receiver:
        receiver.append(0, b"abc")
        assert receiver.finish() == b"abc"


def test_a_size_above_the_limit_is_refused() -> None:
    uploads = PartialUploads(1 << 40, 60, Clock())
    with pytest.raises(PayloadError, match="between 1 and 1000"):
        leave_at(uploads, upload(size=1001), 0)
    assert len(uploads) == 0
