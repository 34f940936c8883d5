"""Which training data came into the weights, once and only once, and what became of the rest.

From what a run's scheduler was told and answered, in order. A batch is a place in a data shard, and
`[start, stop)` are batches. Every fragment is an account of its own: one that is asked for seldom
misses batches that came into another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fragments.records import (
    Answered,
    ContributionKey,
    Receipt,
    Refusal,
    Role,
    Version,
    Welcome,
)
from outer_server.core.events import (
    Contributed,
    Discard,
    Effect,
    Event,
    Join,
    Merged,
    Note,
    Reply,
    Reported,
    RollBack,
    Started,
)
from outer_server.core.lineage import Lineage
from outer_server.core.receive import DROPPED
from outer_server.core.resume import renamed
from outer_server.core.spans import Span, length, without
from outer_server.core.state import ContributionMeta, RunState

Place = tuple[int, int]
"""(shard, fragment)."""

_Lost = tuple[Span, "Reason", str]
"""With the reason, and what there is to say of it."""

_REFUSING = frozenset({"contribution_refused", "evicted"})
"""Notes that say why contributions are thrown away with them."""

_SILENCING = frozenset({"lost", "left", "evicted", "retired"})
"""Notes that a name has no lease any more: nothing that its process says counts."""


class Reason(StrEnum):
    """Why batches did not come into a fragment.

    OVERLAP: they were trained while a newer version was on its way, which then replaced them; or
    nobody asked before that version came. CRASH: their process ended, or was given other data,
    before it had sent them. REFUSED: the server did not take them, or could not merge them.
    ROLLED_BACK: the run went back to before they came. LEFT_OVER: taken, and the run ended.
    WAITING: taken, and no round has merged them yet. UNSENT: nobody has asked for them yet.
    """

    OVERLAP = "overlap"
    CRASH = "crash"
    REFUSED = "refused"
    ROLLED_BACK = "rolled back"
    LEFT_OVER = "left over"
    WAITING = "waiting"
    UNSENT = "unsent"


@dataclass(frozen=True, slots=True)
class Interval:
    """Batches of a shard that a contribution of `learner` to `fragment` was trained on.

    `base` is the version that it was trained from.
    """

    learner: str
    fragment: int
    shard: int
    start: int
    stop: int
    base: Version


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches of a shard that did not come into `fragment`, and why."""

    fragment: int
    shard: int
    start: int
    stop: int
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Miscount:
    """A contribution says that it holds `steps` steps, and its intervals are of `batches`."""

    key: ContributionKey
    steps: int
    batches: int


@dataclass(frozen=True, slots=True)
class Account:
    """All data of a run, by shard and fragment, in order.

    Nothing counts twice where `overlaps` is empty; `merged` and `gaps` together are everything from
    the first batch to the last that the server has heard of. `begins`, by (shard, batch): where
    that first one is, for shards that had been trained on before the tape begins. Of what is before
    that, they are what contributions hold that waited then or came later.
    """

    merged: tuple[Interval, ...]
    gaps: tuple[Gap, ...]
    overlaps: tuple[tuple[Interval, Interval], ...]
    miscounts: tuple[Miscount, ...]
    begins: tuple[tuple[int, int], ...] = ()


def account(
    tape: Iterable[tuple[Event, Reply, Sequence[Effect]]], begin: RunState | None = None
) -> Account:
    """The account of a run.

    Args:
        tape: what the scheduler was told, what it replied, and the effects.
        begin: the state before the first of them; None for a run's birth.
    """
    book = _Book()
    if begin is not None:
        book.open(begin)
    for event, reply, effects in tape:
        book.enter(event, reply, effects)
    return book.close()


@dataclass(frozen=True, slots=True)
class _Process:
    """The bearer of a lease."""

    learner: str
    shard: int
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class _Hole:
    """Batches that a process passed over when it went on from a checkpoint: trained, and lost, by
    the one that died (`LearnerRecord.passed_over`).
    """

    learner: str
    shard: int
    span: Span


@dataclass(frozen=True, slots=True)
class _Entry:
    """A contribution and the batches in it."""

    meta: ContributionMeta
    shard: int
    spans: tuple[Span, ...]

    @property
    def place(self) -> Place:
        return self.shard, self.meta.key.fragment

    @property
    def holes(self) -> list[Span]:
        """What is between its first batch and its last, and not in it."""
        return without([(self.meta.cursor_from, self.meta.cursor_to)], *self.spans)

    def intervals(self) -> list[Interval]:
        key = self.meta.key
        return [
            Interval(key.learner, key.fragment, self.shard, *span, key.base_version)
            for span in self.spans
        ]


@dataclass(slots=True)
class _Book:
    epoch: int = 0
    fragments: int = 0
    processes: dict[int, _Process] = field(default_factory=dict)
    """By token: those that may speak."""
    newest: dict[str, _Process] = field(default_factory=dict)
    holes: list[_Hole] = field(default_factory=list)
    begins: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By shard: where a process began."""
    heard: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By shard: the largest cursor."""
    before: dict[int, int] = field(default_factory=dict)
    """By shard: the largest cursor before the first event."""
    waiting: dict[ContributionKey, _Entry] = field(default_factory=dict)
    values: Lineage[_Entry] = field(default_factory=Lineage)
    lost: dict[Place, list[_Lost]] = field(default_factory=lambda: defaultdict(list))
    """Of contributions that were taken; of two that say of a batch, the later one knows."""
    refused: dict[Place, list[_Lost]] = field(default_factory=lambda: defaultdict(list))
    """Of those that were not: what was refused may have come before, or come again."""
    miscounts: list[Miscount] = field(default_factory=list)

    def open(self, state: RunState) -> None:
        self.epoch, self.fragments = state.epoch, len(state.fragments)
        self.values.go([(each.version, each.digest) for each in state.fragments], state.epoch)
        for record in state.learners.values():
            if record.role is Role.LEARNER:
                process = _Process(record.name, record.shard_index, record.incarnation)
                self.newest[record.name] = process
                if record.live:
                    self.processes[record.token] = process
                self._hear(process.shard, record.cursor)
                holes = (_Hole(record.name, process.shard, span) for span in record.passed_over)
                self.holes.extend(holes)
        self.before = dict(self.heard)
        for fragment in state.fragments:
            taken = fragment.round.order if fragment.round is not None else None
            for meta in (*fragment.arrived, *(taken.contributions if taken else ())):
                self._wait(meta, self.newest.get(meta.key.learner), is_older=True)

    def enter(self, event: Event, reply: Reply, effects: Sequence[Effect]) -> None:
        match event, reply:
            case Join(), Welcome():
                self._join(event, reply)
            case Reported(), _:
                process = self.processes.get(event.token)
                if process is not None:
                    self._hear(process.shard, event.report.cursor)
            case Contributed(), Receipt(duplicate=False):
                self._wait(event.meta, self.processes.get(event.token))
            case Contributed(), Refusal():
                self._refuse(event, reply)
            case Merged(), _:
                self._merge(event)
            case RollBack(), Answered():
                self._begin(event.epoch, keeps=False)
                self.values.go(event.point.fragments, event.epoch)
            case Started(), _:
                self.values.rename(event.digests)
                if event.epoch > self.epoch:
                    self._begin(event.epoch, keeps=event.keeps)
            case _:
                pass
        self._discard(effects)
        for effect in effects:
            if isinstance(effect, Note):
                self._note(effect)

    def _note(self, note: Note) -> None:
        fields = dict(note.fields)
        if note.what == "version_lost":
            epoch = fields.get("epoch", self.epoch)
            if isinstance(epoch, int) and epoch > self.epoch:
                self._begin(epoch, keeps=True)
        elif note.what in _SILENCING:
            self._silence(str(fields.get("learner")))
            if note.what == "retired":
                self.newest.pop(str(fields.get("learner")), None)

    def _silence(self, learner: str) -> None:
        left = {token: each for token, each in self.processes.items() if each.learner != learner}
        self.processes = left

    def _join(self, event: Join, welcome: Welcome) -> None:
        hello = event.hello
        self.epoch, self.fragments = welcome.epoch, len(welcome.versions)
        if hello.role is not Role.LEARNER:
            return
        process = _Process(hello.name, welcome.shard_index, hello.incarnation)
        before = self.newest.get(hello.name)
        self._silence(hello.name)
        self.processes[welcome.lease.token] = self.newest[hello.name] = process
        if process != before or hello.cursor < welcome.cursor:
            self.begins[process.shard].add(welcome.cursor)
        self._hear(process.shard, welcome.cursor)
        # A process that joins again builds on nothing from before where it is to go on.
        is_same = before is not None and before.incarnation == hello.incarnation
        if not is_same and hello.cursor < welcome.cursor:
            span = (hello.cursor, welcome.cursor)
            self.holes.append(_Hole(process.learner, process.shard, span))

    def _begin(self, epoch: int, *, keeps: bool) -> None:
        """All leases end. What waits comes along into a new epoch, or is undone."""
        self.epoch = epoch
        self.processes.clear()
        waiting, self.waiting = self.waiting, {}
        for key, entry in waiting.items():
            if keeps:
                meta = replace(entry.meta, key=renamed(key, epoch))
                self.waiting[meta.key] = replace(entry, meta=meta)
            else:
                self._lose(entry, Reason.ROLLED_BACK, f"before epoch {epoch}")

    def _hear(self, shard: int, cursor: int) -> None:
        self.heard[shard] = max(self.heard[shard], cursor)

    def _entry(self, meta: ContributionMeta, process: _Process, *, is_older: bool) -> _Entry:
        """Who builds on a checkpoint sends what spans its hole. `is_older`: some holes may have
        come after the contribution, which then ends where they do at most; its steps tell.
        """
        start, stop = meta.cursor_from, meta.cursor_to
        holes = [
            hole.span
            for hole in self.holes
            if (hole.learner, hole.shard) == (process.learner, process.shard)
            and start <= hole.span[0]
            and hole.span[1] <= stop
        ]
        spans = without([(start, stop)], *holes)
        if is_older:
            first = sum(hole[1] < stop for hole in holes)
            choices = [without([(start, stop)], *holes[:n]) for n in range(first, len(holes) + 1)]
            spans = next((each for each in choices if length(each) == meta.steps), choices[0])
        return _Entry(meta, process.shard, tuple(spans))

    def _wait(
        self, meta: ContributionMeta, process: _Process | None, *, is_older: bool = False
    ) -> None:
        entry = self._entry(meta, process or _Process(meta.key.learner, -1), is_older=is_older)
        self.waiting[meta.key] = entry
        self._hear(entry.shard, meta.cursor_to)
        self.lost[entry.place] += [(span, Reason.CRASH, "") for span in entry.holes]
        batches = length(entry.spans)
        if batches != meta.steps:
            self.miscounts.append(Miscount(meta.key, meta.steps, batches))

    def _refuse(self, event: Contributed, refusal: Refusal) -> None:
        process = self.processes.get(event.token)
        if process is None:
            return
        entry = self._entry(event.meta, process, is_older=False)
        self.refused[entry.place] += [(s, Reason.REFUSED, refusal.reason) for s in entry.spans]
        if refusal == DROPPED:
            self._hear(process.shard, event.meta.cursor_to)

    def _merge(self, event: Merged) -> None:
        if event.epoch is not None and event.epoch < self.epoch:
            return  # It was under way when the run went back, and is of no use.
        entries = list[_Entry]()
        for meta in event.order.contributions:
            if meta.key not in self.waiting:
                self._wait(meta, self.newest.get(meta.key.learner), is_older=True)
            entries.append(self.waiting.pop(meta.key))
        if event.refused is not None:
            for entry in entries:
                self._lose(entry, Reason.REFUSED, event.refused)
            entries = []
        self.values.add(event.fragment, event.version, event.digest, entries)

    def _discard(self, effects: Sequence[Effect]) -> None:
        """Of what was merged nothing waits any more; the rest is thrown away for a reason."""
        notes = [effect for effect in effects if isinstance(effect, Note)]
        refusals = [note.reason for note in notes if note.what in _REFUSING]
        for effect in effects:
            if isinstance(effect, Discard):
                for key in effect.keys:
                    entry = self.waiting.pop(key, None)
                    if entry is not None and refusals:
                        self._lose(entry, Reason.REFUSED, refusals[0])
                    elif entry is not None:
                        self._lose(entry, Reason.LEFT_OVER, "the run is finished")

    def _lose(self, entry: _Entry, reason: Reason, detail: str) -> None:
        self.lost[entry.place] += [(span, reason, detail) for span in entry.spans]

    def close(self) -> Account:
        """Sum up."""
        for entry, epoch in self.values.undone.items():
            self._lose(entry, Reason.ROLLED_BACK, f"before epoch {epoch}")
        for entry in self.waiting.values():
            self._lose(entry, Reason.WAITING, "")
        by_place: dict[Place, list[Interval]] = defaultdict(list)
        for entry in self.values.held():
            by_place[entry.place] += entry.intervals()
        merged: list[Interval] = []
        gaps: list[Gap] = []
        overlaps: list[tuple[Interval, Interval]] = []
        for shard in sorted(self.heard):
            for fragment in range(self.fragments):
                here = sorted(by_place[shard, fragment], key=lambda i: (i.start, i.stop))
                merged += here
                overlaps += _overlaps(here)
                gaps += self._gaps((shard, fragment), here)
        begins = tuple((shard, cursor) for shard, cursor in sorted(self.before.items()) if cursor)
        return Account(tuple(merged), tuple(gaps), tuple(overlaps), tuple(self.miscounts), begins)

    def _gaps(self, place: Place, merged: Sequence[Interval]) -> list[Gap]:
        left: list[Span] = [(0, self.heard[place[0]])]
        for interval in merged:
            left = without(left, (interval.start, interval.stop))
        gaps, left = self._told(place, left, self.lost[place][::-1])
        # What was trained before the tape begins is known only as far as contributions hold it.
        left = without(left, (0, self.before.get(place[0], 0)))
        more, left = self._told(place, left, self.refused[place])
        gaps += more
        last = max((interval.stop for interval in merged), default=0)
        for span in left:
            gaps += self._trained_for_nothing(place, span, is_last=span[0] >= last)
        return sorted(gaps, key=lambda gap: gap.start)

    def _told(
        self, place: Place, left: list[Span], lost: Sequence[_Lost]
    ) -> tuple[list[Gap], list[Span]]:
        """Gaps of `left` that `lost` tells of, the first in it first, and what is left."""
        shard, fragment = place
        gaps: list[Gap] = []
        for span, reason, detail in lost:
            for each in left:
                both = max(each[0], span[0]), min(each[1], span[1])
                if both[0] < both[1]:
                    gaps.append(Gap(fragment, shard, *both, reason, detail))
            left = without(left, span)
        return gaps, left

    def _trained_for_nothing(self, place: Place, span: Span, *, is_last: bool) -> list[Gap]:
        """No contribution holds `span`: up to where its last process begins, others had it."""
        shard, fragment = place
        start, stop = span
        begins = [begin for begin in self.begins[shard] if start < begin <= stop]
        middle = max(begins, default=start)
        rest = Reason.UNSENT if is_last else Reason.OVERLAP
        parts = (((start, middle), Reason.CRASH), ((middle, stop), rest))
        return [Gap(fragment, shard, *part, reason) for part, reason in parts if part[0] < part[1]]


def _overlaps(intervals: Sequence[Interval]) -> list[tuple[Interval, Interval]]:
    """Pairs that share a batch; `intervals` begin in order. Each is held to the one before it that
    reaches furthest.
    """
    found: list[tuple[Interval, Interval]] = []
    furthest: Interval | None = None
    for interval in intervals:
        if furthest is not None and interval.start < furthest.stop:
            found.append((furthest, interval))
        if furthest is None or interval.stop > furthest.stop:
            furthest = interval
    return found
