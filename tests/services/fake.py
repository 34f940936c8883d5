"""A small outer server for tests of the network side: it keeps what it is told, merges nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import google_crc32c

from fragments.errors import RefusedError
from fragments.payload import INT8_CODEC, Payload
from fragments.records import (
    PROTOCOL_VERSION,
    Adopted,
    Contribution,
    ContributionKey,
    Decline,
    Evaluation,
    Goodbye,
    Hello,
    Lease,
    Phase,
    Receipt,
    RefusalCode,
    Report,
    Role,
    RunDescription,
    RunStatus,
    ServerNote,
    Update,
    Version,
    Welcome,
)
from fragments.runspec import RunSpec

RUN_ID, DIGEST, FRAGMENTS, LIMIT = "run-1", "d" * 64, 3, 64 << 20

Sink = Callable[[ServerNote], None]


def payload_of(data: bytes, codec: str = INT8_CODEC) -> Payload:
    return Payload(codec, 2 * len(data), google_crc32c.value(data), data)


def hello(name: str = "eu", incarnation: str = "i1", **changes: object) -> Hello:
    first = Hello(PROTOCOL_VERSION, RUN_ID, DIGEST, name, Role.LEARNER, incarnation)
    return replace(first, **changes)  # type: ignore[arg-type]


def contribution(
    data: bytes, fragment: int = 0, base: int = 0, learner: str = "eu"
) -> Contribution:
    key = ContributionKey(learner, fragment, Version(1, base))
    return Contribution(key, Version(1, base), 3, 96, 4, 7, payload_of(data))


class FakeOuter:
    """Satisfies `services.outer.port.OuterPort`; everything that came in is in public lists."""

    def __init__(self, generation: int = 1, max_learners: int = 4) -> None:
        self.generation = generation
        self.codec = INT8_CODEC
        self.spec = RunSpec(run_id=RUN_ID, max_learners=max_learners)
        self.phase = Phase.TRAINING
        self.published: dict[int, tuple[Update, ...]] = {}
        self.heard: list[Report | Decline | Adopted | Evaluation] = []
        self.contributions: list[Contribution] = []
        self.attached: list[str] = []
        self.left: list[str] = []
        self.up: dict[str, int] = {}
        self.down: dict[str, int] = {}
        self.failure: Exception | None = None
        self.changed = threading.Condition()
        self._leases: dict[str, tuple[Lease, str]] = {}
        self._sinks: dict[str, Sink] = {}
        self._receipts: dict[ContributionKey, int] = {}

    def wait(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), "did not happen in time"

    def say(self, learner: str, *notes: ServerNote) -> bool:
        """Whether the learner's stream is attached."""
        sink = self._sinks.get(learner)
        if sink is None:
            return False
        for note in notes:
            sink(note)
        return True

    def describe(self) -> RunDescription:
        return RunDescription(
            RUN_ID, PROTOCOL_VERSION, self.spec.model_dump_json(), "{}", DIGEST, 0, "",
            self.generation, 1, self.phase,
        )  # fmt: skip

    def join(self, hello: Hello) -> Welcome:
        self._fail()
        with self.changed:
            if hello.layout_digest != DIGEST:
                raise RefusedError(RefusalCode.MISMATCH, "the layout differs")
            if hello.name not in self._leases and len(self._leases) >= self.spec.max_learners:
                raise RefusedError(RefusalCode.FULL, "the run has no place for another learner")
            old = self._leases.get(hello.name)
            if old is not None and old[1] != hello.incarnation and hello.name in self._sinks:
                reason = "another process joined under this name"
                self._sinks.pop(hello.name)(Goodbye(RefusalCode.FENCED, reason))
            token = 1 if old is None else old[0].token + 1
            lease = Lease(hello.name, token, 15.0)
            self._leases[hello.name] = lease, hello.incarnation
        return Welcome(
            lease, self.generation, 1, self.phase, (0,) * FRAGMENTS, (-1,) * FRAGMENTS,
            0, 2, hello.cursor, 10, 320, 5.0,
        )  # fmt: skip

    def attach(self, lease: Lease, sink: Sink) -> None:
        self._check(lease)
        with self.changed:
            old = self._sinks.get(lease.learner)
            self._sinks[lease.learner] = sink
            self.attached.append(lease.learner)
            self.changed.notify_all()
        if old is not None:
            old(Goodbye(None, "a newer stream of this lease"))

    def detach(self, lease: Lease, sink: Sink) -> None:
        with self.changed:
            if self._sinks.get(lease.learner) is sink:
                del self._sinks[lease.learner]
            self.changed.notify_all()

    def is_attached(self, learner: str) -> bool:
        return learner in self._sinks

    def report(self, lease: Lease, report: Report) -> None:
        self._hear(lease, report)

    def decline(self, lease: Lease, decline: Decline) -> None:
        self._hear(lease, decline)

    def adopted(self, lease: Lease, adopted: Adopted) -> None:
        self._hear(lease, adopted)

    def evaluated(self, lease: Lease, evaluation: Evaluation) -> None:
        self._hear(lease, evaluation)

    def leave(self, lease: Lease, reason: str) -> None:
        self.left.append(f"{lease.learner}: {reason}")

    def admit(self, lease: Lease, key: ContributionKey) -> None:
        self._check(lease)
        if key.fragment >= FRAGMENTS:
            raise RefusedError(RefusalCode.MISMATCH, f"there is no fragment {key.fragment}")

    def contribute(self, lease: Lease, contribution: Contribution) -> Receipt:
        self._check(lease)
        self._fail()
        with self.changed:
            crc, before = contribution.payload.crc32c, self._receipts.get(contribution.key)
            if before is not None and before != crc:
                raise RefusedError(RefusalCode.CONSUMED, "this base was consumed already")
            self._receipts[contribution.key] = crc
            if before is None:
                self.contributions.append(contribution)
            self.changed.notify_all()
        return Receipt(contribution.key, duplicate=before is not None)

    def updates(self, lease: Lease, fragment: int, have: Version | None) -> tuple[Update, ...]:
        self._check(lease)
        chain = self.published.get(fragment, ())
        return tuple(update for update in chain if have is None or update.version > have)

    def count_bytes(self, learner: str, up: int, down: int) -> None:
        with self.changed:
            self.up[learner] = self.up.get(learner, 0) + up
            self.down[learner] = self.down.get(learner, 0) + down
            self.changed.notify_all()

    def status(self) -> RunStatus:
        self._fail()
        return RunStatus(
            RUN_ID, self.phase, "as told", self.generation, 1, 10, 320, 96, 96, 1000, 1, 0,
            3.5, 90.0, sum(self.up.values()), sum(self.down.values()), 24, "",
        )  # fmt: skip

    def payload_limit(self, fragment: int) -> int:
        return LIMIT

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _hear(self, lease: Lease, note: Report | Decline | Adopted | Evaluation) -> None:
        self._check(lease)
        with self.changed:
            self.heard.append(note)
            self.changed.notify_all()

    def _check(self, lease: Lease) -> None:
        held = self._leases.get(lease.learner)
        if held is None or held[0].token < lease.token:
            raise RefusedError(RefusalCode.LEASE_LOST, "the server does not know this lease")
        if held[0].token > lease.token:
            raise RefusedError(RefusalCode.FENCED, "another process joined under this name")
