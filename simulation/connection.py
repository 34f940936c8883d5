"""A simulated learner's line to the server: session, outbox and inbox, without a thread.

It follows `learner.session`, `learner.outbox` and `learner.inbox`, which are made of threads: one
push and one pull at a time, an ask answered when the outbox comes to it, what did not come through
sent again, missing versions pulled oldest fragment first.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from fragments.records import (
    PROTOCOL_VERSION,
    Adopted,
    Ask,
    Contribution,
    Decline,
    Goodbye,
    Hello,
    Lease,
    Phase,
    Progress,
    Published,
    Refusal,
    RefusalCode,
    Report,
    Role,
    ServerNote,
    Update,
    Version,
    Welcome,
)
from learner.island import Island
from outer_server.core.events import Attached, Declined, Event, HasAdopted, Join, Reported
from simulation.clock import Order, VirtualClock
from simulation.pipe import Pipe
from simulation.ports import Server
from simulation.world import Link

_NAMESPACE = uuid.UUID("6d0f6f3c-9b0c-4a3e-8f0e-0d5c2a0b7f11")
"""Incarnations are made from name and count, not at random: the same run has the same ones."""


@dataclass(slots=True)
class Traffic:
    """What went over a learner's line, in bytes of payload and the parameters that they encode."""

    bytes_up: int = 0
    parameters_up: int = 0
    bytes_down: int = 0
    bytes_down_full: int = 0
    parameters_down: int = 0


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A contribution, and the learner's step that it was made at."""

    contribution: Contribution
    at_step: int


class Connection:
    """The line of one process.

    Args:
        clock, server: the run's.
        island: the learner's copy; its `completed` is what asks are answered from.
        link: what the line is like; `step_s` is what its "steps" are measured in.
        number: which process of this name it is, from 0.
        on_welcome: called with every grant of a lease, before anything else is heard.
        on_change: called when a value was prepared, or when the run's phase may have changed.
    """

    def __init__(
        self,
        clock: VirtualClock,
        server: Server,
        island: Island,
        link: Link,
        step_s: float,
        number: int,
        traffic: Traffic,
        on_welcome: Callable[[Welcome], None],
        on_change: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._server = server
        self._island = island
        self._latency_s = link.latency_s
        up_s = None if link.upload_steps is None else link.upload_steps * step_s
        down_s = None if link.download_steps is None else link.download_steps * step_s
        self._up = Pipe(clock, link.up_mbit_s, up_s, link.latency_s)
        self._down = Pipe(clock, link.down_mbit_s, down_s, link.latency_s)
        self._incarnation = uuid.uuid5(_NAMESPACE, f"{island.name}/{number}").hex
        self._traffic = traffic
        self._on_welcome = on_welcome
        self._on_change = on_change
        self._lease: Lease | None = None
        self._adopted: dict[int, Adopted] = {}
        now = island.completed
        self.last_report = Report(now.step, now.tokens, now.cursor)
        self._stream = 0
        self._open = False
        self._asks: dict[int, Ask] = {}
        self._unsent: dict[int, _Outgoing] = {}
        self._pushing: _Outgoing | None = None
        self._wanted: dict[int, Version] = {}
        self._pulling = False
        self.progress = Progress(0, 0, Phase.WAITING)
        self._sent_steps: dict[int, int] = {}

    def connect(self) -> None:
        """Take the lease, or keep it where it still holds, and open the stream."""
        self._stream += 1
        self._later(self._arrive_at_server)

    def cut(self) -> None:
        """The line is gone: what is under way is lost, and nobody hears anybody."""
        self._stream += 1
        self._open = False
        self._server.detach(self._island.name)
        self._up.reset()
        self._down.reset()
        self._pulling = False
        self._keep_pushing()

    def report(self, report: Report) -> None:
        """Say where the learner is, in its own counters; said again as a heartbeat."""
        self.last_report = report
        self._say(lambda lease: Reported(lease.learner, lease.token, report))

    def adopted(self, adopted: Adopted) -> None:
        """Say that a version is trained on; said again on every new stream."""
        self._adopted[adopted.fragment] = adopted
        self._say(lambda lease: HasAdopted(lease.learner, lease.token, adopted))

    def sent_step(self, base_step: int, fragment: int) -> int:
        """The learner's step up to which the server has, or will have, this fragment's progress:
        that of the last contribution that arrived, or of the base where it is newer.
        """
        return max(base_step, self._sent_steps.get(fragment, 0))

    @property
    def idle(self) -> bool:
        """Nothing is wanted, under way or to be answered."""
        busy = self._pushing is not None or self._pulling
        return not (self._asks or self._unsent or self._missing() is not None or busy)

    def _later(self, action: Callable[[], None]) -> None:
        """`action` after one way over the line, unless it is cut meanwhile."""
        stream = self._stream

        def arrive() -> None:
            if stream == self._stream:
                action()

        self._clock.after(self._latency_s, Order.ARRIVAL, arrive)

    def _arrive_at_server(self) -> None:
        name, lease = self._island.name, self._lease
        if lease is None or self._server.call(Attached(name, lease.token), sink=self._sink()):
            welcome = self._server.call(Join(self._hello()))
            if not isinstance(welcome, Welcome):
                raise TypeError(f"{name} was refused: {welcome}")
            self._later(lambda: self._welcomed(welcome))
            lease = welcome.lease
            self._server.call(Attached(name, lease.token), sink=self._sink())
        else:
            self._later(self._attached)

    def _sink(self) -> Callable[[ServerNote], None]:
        return lambda note: self._later(lambda: self._hear(note))

    def _hello(self) -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            run_id=self._server.state.spec.run_id,
            layout_digest=self._island.layout.digest,
            name=self._island.name,
            role=Role.LEARNER,
            incarnation=self._incarnation,
            # What an earlier process held is told once it is known to be a base still.
            bases=self._island.held_bases() if self._lease is not None else (),
            cursor=self._island.completed.cursor,
        )

    def _welcomed(self, welcome: Welcome) -> None:
        self._lease = welcome.lease
        self._island.consumed(welcome.consumed, welcome.epoch)
        for fragment, version in enumerate(welcome.versions):
            self._wanted[fragment] = Version(welcome.epoch, version)
        self.progress = Progress(welcome.global_step, welcome.tokens_trained, welcome.phase)
        self._on_welcome(welcome)
        self._attached()
        self._clock.after(welcome.heartbeat_s, Order.TIMER, self._heartbeat(welcome.heartbeat_s))

    def _attached(self) -> None:
        """The stream is open: say again what the one before it may have swallowed."""
        self._open = True
        for adopted in list(self._adopted.values()):
            self.adopted(adopted)
        self.report(self.last_report)
        self._push_next()
        self._pull_next()

    def _heartbeat(self, every_s: float) -> Callable[[], None]:
        stream = self._stream

        def beat() -> None:
            if stream == self._stream:
                self.report(self.last_report)
                self._clock.after(every_s, Order.TIMER, beat)

        return beat

    def _say(self, event: Callable[[Lease], Event]) -> None:
        lease = self._lease
        if self._open and lease is not None:
            self._later(lambda: self._tell(event(lease)))

    def _tell(self, event: Event) -> None:
        self._server.call(event)

    def _hear(self, note: ServerNote) -> None:
        match note:
            case Ask():
                self._asks[note.fragment] = note
                self._push_next()
            case Published():
                self._wanted[note.fragment] = note.version
                self._pull_next()
            case Progress():
                self.progress = note
                self._on_change()
            case Goodbye(code=code):
                if code is RefusalCode.BAD_PAYLOAD:
                    self._island.forget_all()
                self.cut()
                self.connect()

    def _push_next(self) -> None:
        """Answer the oldest ask, or send again what did not come through; one at a time."""
        if self._pushing is not None or not self._open:
            return
        if not self._asks and self._unsent:
            self._upload(self._unsent.pop(next(iter(self._unsent))))
        elif self._asks:
            self._answer(self._asks.pop(next(iter(self._asks))))

    def _answer(self, ask: Ask) -> None:
        kept = self._unsent.pop(ask.fragment, None)
        if kept is not None:
            self._upload(kept)
            return
        answer = self._island.answer(ask)
        if isinstance(answer, Decline):
            self._say(lambda lease: Declined(lease.learner, lease.token, answer))
            self._push_next()
        else:
            self._upload(_Outgoing(answer, self._island.completed.step))

    def _upload(self, outgoing: _Outgoing) -> None:
        self._pushing = outgoing
        contribution = outgoing.contribution
        stream, lease = self._stream, self._lease
        wire_bytes = len(contribution.payload.data)
        fragment = contribution.key.fragment
        self._traffic.bytes_up += wire_bytes
        self._traffic.parameters_up += self._island.layout.fragments[fragment].num_values

        def arrive() -> None:
            if stream != self._stream or lease is None:
                return
            reply = self._server.contribute(lease, contribution)
            if isinstance(reply, Refusal) and reply.code is RefusalCode.LEASE_LOST:
                self._later(self._keep_pushing)
                return
            self._sent_steps[fragment] = outgoing.at_step
            self._later(self._pushed)

        self._up.send(wire_bytes, arrive)

    def _pushed(self) -> None:
        """Receipt or refusal: either way the contribution is dealt with."""
        self._pushing = None
        self._push_next()

    def _keep_pushing(self) -> None:
        """The line was cut or the lease lost: what was under way is still good on the next one."""
        if self._pushing is not None:
            self._unsent[self._pushing.contribution.key.fragment] = self._pushing
            self._pushing = None

    def _missing(self) -> int | None:
        for fragment, version in self._wanted.items():
            newest = self._island.newest_version(fragment)
            if newest is None or newest < version:
                return fragment
        return None

    def _pull_next(self) -> None:
        fragment = self._missing()
        if self._pulling or not self._open or fragment is None:
            return
        self._pulling = True
        self._later(lambda: self._serve_pull(fragment))

    def _serve_pull(self, fragment: int) -> None:
        """At the server: send what leads to the newest version."""
        have = self._island.newest_version(fragment)
        updates = self._server.updates(fragment, have)
        stream = self._stream

        def arrive() -> None:
            if stream == self._stream:
                self._pulled(updates)

        self._down.send(sum(len(update.payload.data) for update in updates), arrive)

    def _pulled(self, updates: tuple[Update, ...]) -> None:
        for update in updates:
            size = len(update.payload.data)
            if update.from_version is None:
                self._traffic.bytes_down_full += size
            else:
                self._traffic.bytes_down += size
                values = self._island.layout.fragments[update.fragment].num_values
                self._traffic.parameters_down += values
            self._island.prepare(update)
        self._pulling = False
        self._on_change()
        self._pull_next()
