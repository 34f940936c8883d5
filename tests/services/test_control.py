from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from diloco.v1 import control_pb2, control_pb2_grpc
from fragments.errors import RefusedError, UnreachableError
from fragments.records import (
    Adopted,
    Ask,
    Decline,
    DeclineReason,
    Evaluation,
    Goodbye,
    Lease,
    Phase,
    Progress,
    Published,
    RefusalCode,
    Report,
    ServerNote,
    Version,
)
from services.client import GrpcLink
from services.client.line import GrpcControlLine
from services.settings import ClientSettings
from services.translate import learner_note_to_wire, lease_to_wire
from tests.services.conftest import QUICK, Serve, Site
from tests.services.fake import FakeOuter, hello

V = Version(1, 4)


class Listener:
    """Collects the notes of one line, and whether it closed."""

    def __init__(self) -> None:
        self.notes: list[ServerNote] = []
        self.closed = 0
        self._changed = threading.Condition()

    def note(self, note: ServerNote) -> None:
        with self._changed:
            self.notes.append(note)
            self._changed.notify_all()

    def on_closed(self) -> None:
        with self._changed:
            self.closed += 1
            self._changed.notify_all()

    def wait(self, *, notes: int = 0, closed: int = 0) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: len(self.notes) >= notes and self.closed >= closed, 10
            ), (self.notes, self.closed)

    def open(self, link: GrpcLink, lease: Lease) -> GrpcControlLine:
        return link.open_control(lease, self.note, self.on_closed)


def test_describing_tells_where_bulk_is(serve: Serve) -> None:
    site = serve(advertise="bulk.example.org")
    run = site.link().describe()
    assert (run.run_id, run.phase, run.generation) == ("run-1", Phase.TRAINING, 1)
    assert (run.bulk_port, run.bulk_host) == (site.services.ports.bulk, "bulk.example.org")


def test_joining_again_raises_the_token(site: Site) -> None:
    link = site.link()
    first, second = link.join(hello(cursor=7)), link.join(hello(cursor=7))
    assert (first.lease.learner, first.cursor, first.consumed) == ("eu", 7, (-1, -1, -1))
    assert second.lease.token > first.lease.token


def test_joining_a_full_or_another_run_is_refused_at_once(serve: Serve) -> None:
    link = serve(FakeOuter(max_learners=1)).link()
    link.join(hello("a"))
    with pytest.raises(RefusedError, match="no place") as full:
        link.join(hello("b"))
    assert full.value.code is RefusalCode.FULL
    with pytest.raises(RefusedError, match="layout") as other:
        link.join(hello("a", layout_digest="0"))
    assert other.value.code is RefusalCode.MISMATCH


def test_notes_and_messages_pass_in_order(site: Site) -> None:
    link, ears = site.link(), Listener()
    lease = link.join(hello()).lease
    line = ears.open(link, lease)
    site.outer.wait(lambda: site.outer.is_attached("eu"))
    said: list[ServerNote] = [Ask(0, V), Published(1, V), Ask(2, V)]
    site.outer.say("eu", *said)
    ears.wait(notes=3)
    assert ears.notes == said
    told: list[Decline | Adopted | Evaluation] = [
        Decline(0, V, DeclineReason.NO_STEPS),
        Adopted(1, V, "ab", 3),
        Evaluation(2.5, "bits per byte", 10, 320, (1, 2, 3)),
    ]
    line.decline(Decline(0, V, DeclineReason.NO_STEPS))
    line.adopted(Adopted(1, V, "ab", 3))
    line.evaluated(Evaluation(2.5, "bits per byte", 10, 320, (1, 2, 3)))
    line.report(Report(5, 160, 5, 0.0, 0.1, 2.0))
    site.outer.wait(lambda: len(site.outer.heard) == 4)
    assert site.outer.heard == [*told, Report(5, 160, 5, 0.0, 0.1, 2.0)]
    line.close()
    site.outer.wait(lambda: not site.outer.is_attached("eu"))
    assert ears.closed == 0


def test_only_the_newest_report_waits(site: Site) -> None:
    """A burst of reports never piles up: the last one arrives, and in order."""
    link, ears = site.link(), Listener()
    line = ears.open(link, link.join(hello()).lease)
    for step in range(5000):
        line.report(Report(step, step, step, 0.0, 0.0, 0.0))
    last = Report(4999, 4999, 4999, 0.0, 0.0, 0.0)
    site.outer.wait(lambda: site.outer.heard[-1:] == [last])
    steps = [note.step for note in site.outer.heard if isinstance(note, Report)]
    assert steps == sorted(set(steps))


def test_what_is_queued_at_close_is_still_said(site: Site) -> None:
    link, ears = site.link(), Listener()
    line = ears.open(link, link.join(hello()).lease)
    line.report(Report(9, 9, 9, 0.0, 0.0, 0.0))
    line.close()
    site.outer.wait(lambda: len(site.outer.heard) == 1)


def test_a_second_process_of_a_name_fences_the_first(site: Site) -> None:
    old, new, ears = site.link(), site.link(), Listener()
    line = ears.open(old, old.join(hello(incarnation="i1")).lease)
    site.outer.wait(lambda: site.outer.is_attached("eu"))
    new.join(hello(incarnation="i2"))
    ears.wait(notes=1, closed=1)
    assert ears.notes == [Goodbye(RefusalCode.FENCED, "another process joined under this name")]
    line.report(Report(1, 1, 1))  # on a line that is over: dropped, no error


def test_a_second_stream_of_a_lease_replaces_the_first(site: Site) -> None:
    link, first, second = site.link(), Listener(), Listener()
    lease = link.join(hello()).lease
    first.open(link, lease)
    site.outer.wait(lambda: site.outer.is_attached("eu"))
    second.open(link, lease)
    first.wait(notes=1, closed=1)
    assert first.notes == [Goodbye(None, "a newer stream of this lease")]
    site.outer.wait(lambda: len(site.outer.attached) == 2)
    site.outer.say("eu", Ask(1, V))
    second.wait(notes=1)
    assert second.notes == [Ask(1, V)]
    assert second.closed == 0


def test_a_report_on_a_lost_lease_ends_the_stream_with_the_reason(site: Site) -> None:
    link, ears = site.link(), Listener()
    stale = link.join(hello()).lease
    line = ears.open(link, stale)
    site.outer.wait(lambda: site.outer.is_attached("eu"))
    link.join(hello())  # the same process: not fenced, but the old token is
    line.report(Report(1, 1, 1))
    ears.wait(notes=1, closed=1)
    assert isinstance(ears.notes[0], Goodbye)
    assert ears.notes[0].code is RefusalCode.FENCED


def test_attaching_without_a_lease_says_why_and_closes_the_line(site: Site) -> None:
    ears = Listener()
    ears.open(site.link(), Lease("nobody", 1, 1.0))
    ears.wait(notes=1, closed=1)
    assert ears.notes == [
        Goodbye(RefusalCode.LEASE_LOST, "the server does not know this lease"),
    ]


def test_a_stream_that_falls_behind_is_ended_and_can_be_reopened(serve: Serve) -> None:
    site = serve(queued_notes=16)
    link, ears = site.link(), Listener()
    lease = link.join(hello()).lease
    hold = threading.Event()

    def slow(note: ServerNote) -> None:
        hold.wait(10)
        ears.note(note)

    link.open_control(lease, slow, ears.on_closed)
    site.outer.wait(lambda: site.outer.is_attached("eu"))
    # Far more than the queue and the flow-control window of the stream hold.
    for _ in range(100_000):
        if not site.outer.say("eu", *[Published(0, V)] * 10):
            break
    site.outer.wait(lambda: not site.outer.is_attached("eu"))
    hold.set()
    ears.wait(closed=1)
    again = Listener()
    again.open(link, lease)
    site.outer.wait(lambda: site.outer.is_attached("eu"))
    site.outer.say("eu", Ask(0, V))
    again.wait(notes=1)


def test_progress_notes_in_a_row_take_one_place(serve: Serve) -> None:
    site = serve(queued_notes=16)
    link, ears = site.link(), Listener()
    ears.open(link, link.join(hello()).lease)
    site.outer.wait(lambda: site.outer.is_attached("eu"))
    for step in range(20_000):
        site.outer.say("eu", Progress(step, step, Phase.TRAINING))
    ears.wait(notes=1)
    site.outer.say("eu", Ask(0, V))
    while ears.notes[-1:] != [Ask(0, V)]:
        ears.wait(notes=len(ears.notes) + 1)
    assert ears.notes[-2] == Progress(19_999, 19_999, Phase.TRAINING)


def test_a_server_that_stops_says_goodbye(site: Site) -> None:
    link, ears = site.link(), Listener()
    ears.open(link, link.join(hello()).lease)
    site.outer.wait(lambda: site.outer.is_attached("eu"))
    site.services.stop(grace_s=5)
    ears.wait(notes=1, closed=1)
    assert isinstance(ears.notes[0], Goodbye)
    assert ears.notes[0].code is None
    with pytest.raises(UnreachableError, match=f"{site.address}.*check that"):
        link.join(hello())


def test_a_stream_must_begin_with_attach(serve: Serve) -> None:
    site = serve(attach_s=0.3)
    with grpc.insecure_channel(site.address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        with pytest.raises(grpc.RpcError) as wrong:
            list(stub.Control(iter([learner_note_to_wire(Report(1, 1, 1))]), timeout=5))
        silent = stub.Control(_never(over := threading.Event()), timeout=5)
        with pytest.raises(grpc.RpcError) as mute:
            list(silent)
        over.set()
    assert wrong.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert mute.value.code() is grpc.StatusCode.CANCELLED


def _never(over: threading.Event) -> Iterator[control_pb2.ControlRequest]:
    over.wait(10)
    yield from ()


@pytest.mark.parametrize("how", ["another process", "a newer stream"])
def test_a_replaced_stream_ends_with_aborted(site: Site, how: str) -> None:
    """As the contract says, for clients of any make."""
    link = site.link()
    lease = link.join(hello()).lease
    attach = control_pb2.ControlRequest(attach=control_pb2.Attach(lease=lease_to_wire(lease)))
    over = threading.Event()

    def requests() -> Iterator[control_pb2.ControlRequest]:
        yield attach
        over.wait(10)

    with grpc.insecure_channel(site.address) as channel:
        call = control_pb2_grpc.ControlServiceStub(channel).Control(requests(), timeout=8)
        site.outer.wait(lambda: site.outer.is_attached("eu"))
        if how == "another process":
            site.link().join(hello(incarnation="i2"))
        else:
            Listener().open(link, lease)
        assert how in next(call).goodbye.reason
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() is grpc.StatusCode.ABORTED
        over.set()


def test_leaving_is_told_once_and_never_fails(site: Site) -> None:
    link = site.link()
    lease = link.join(hello()).lease
    link.leave(lease, "done")
    assert site.outer.left == ["eu: done"]
    site.services.stop(0)
    link.leave(lease, "done again")


def test_an_older_server_is_refused(serve: Serve) -> None:
    site = serve(FakeOuter(generation=5))
    link, ears = site.link(), Listener()
    lease = link.join(hello(generation_seen=5)).lease
    ears.open(link, lease)
    site.outer.wait(lambda: site.outer.is_attached("eu"))
    site.outer.generation = 4
    site.outer.say("eu", Ask(0, V))
    ears.wait(closed=1)
    assert ears.notes == []
    for call in (link.describe, lambda: link.join(hello())):
        with pytest.raises(UnreachableError, match=r"older server .generation 4, 5 was seen"):
            call()


def test_a_server_that_another_run_replaced_is_refused(site: Site) -> None:
    link = site.link()
    run = link.describe()
    site.outer.describe = lambda: type(run)(  # type: ignore[method-assign]
        "run-2", 1, run.run_spec_json, "{}", run.layout_digest, 0, "", 2, 1, Phase.TRAINING
    )
    with pytest.raises(RefusedError, match="run 'run-2' answers"):
        link.describe()


def test_nobody_there_is_one_sentence_in_bounded_time() -> None:
    settings = ClientSettings(call_s=1, tries=2, retry_wait_s=0.01, retry_wait_max_s=0.05)
    link = GrpcLink("127.0.0.1:9", settings=settings)
    for call in (link.describe, lambda: link.join(hello())):
        with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9 .*check that `diloco serve`"):
            call()
    link.close()
    link.close()
    with pytest.raises(UnreachableError, match="was closed"):
        link.describe()


def test_closing_a_link_ends_its_waits(serve: Serve) -> None:
    """A call between two tries gives up at once, however long it would have waited."""
    waits = ClientSettings(**{**QUICK.model_dump(), "retry_wait_s": 60, "retry_wait_max_s": 60})
    link = GrpcLink("127.0.0.1:9", settings=waits)
    failed = threading.Event()

    def call() -> None:
        with pytest.raises(UnreachableError):
            link.describe()
        failed.set()

    threading.Thread(target=call, daemon=True).start()
    link.close()
    assert failed.wait(10)
