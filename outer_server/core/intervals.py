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

from fragments.records import ContributionKey, Receipt, Refusal, Role, Version, Welcome
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
    Started,
)
from outer_server.core.resume import renamed
from outer_server.core.state import ContributionMeta, RunState

Span = tuple[int, int]
"""[start, stop)."""

Place = tuple[int, int]
"""(shard, fragment)."""

_REFUSING = frozenset({"contribution_refused", "evicted"})
"""Notes that say why contributions are thrown away with them."""


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
    that first one is, for shards that had been trained on before the tape begins.
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
    the one that died.
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
    newest: dict[str, _Process] = field(default_factory=dict)
    holes: list[_Hole] = field(default_factory=list)
    begins: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By shard: where a process began."""
    heard: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By shard: the largest cursor."""
    before: dict[int, int] = field(default_factory=dict)
    """By shard: the largest cursor before the first event."""
    waiting: dict[ContributionKey, _Entry] = field(default_factory=dict)
    merged: dict[ContributionKey, tuple[int, _Entry]] = field(default_factory=dict)
    """With the version that each came into."""
    lost: dict[Place, list[tuple[Span, Reason, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    miscounts: list[Miscount] = field(default_factory=list)

    def open(self, state: RunState) -> None:
        self.epoch, self.fragments = state.epoch, len(state.fragments)
        for record in state.learners.values():
            if record.role is Role.LEARNER:
                process = _Process(record.name, record.shard_index, record.incarnation)
                self.processes[record.token] = self.newest[record.name] = process
                self._hear(process.shard, record.cursor)
        self.before = dict(self.heard)
        for fragment in state.fragments:
            taken = fragment.round.order if fragment.round is not None else None
            for meta in (*fragment.arrived, *(taken.contributions if taken else ())):
                self._wait(meta, self.newest.get(meta.key.learner))

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
                process = self.processes.get(event.token)
                if process is not None:
                    self._lose(self._entry(event.meta, process), Reason.REFUSED, reply.reason)
            case Merged(), _:
                self._merge(event)
            case Started(), _ if event.epoch > self.epoch:
                self._begin(event.epoch, keeps=event.keeps)
            case _:
                pass
        for effect in effects:
            if isinstance(effect, Note) and effect.what == "version_lost":
                epoch = dict(effect.fields).get("epoch", self.epoch)
                if isinstance(epoch, int) and epoch > self.epoch:
                    self._begin(epoch, keeps=True)
        self._discard(effects)

    def _join(self, event: Join, welcome: Welcome) -> None:
        hello = event.hello
        self.fragments = len(welcome.versions)
        if welcome.epoch > self.epoch:
            self._roll_back(welcome)
        if hello.role is not Role.LEARNER:
            return
        process = _Process(hello.name, welcome.shard_index, hello.incarnation)
        before = self.newest.get(hello.name)
        self.processes[welcome.lease.token] = self.newest[hello.name] = process
        if process != before or hello.cursor < welcome.cursor:
            self.begins[process.shard].add(welcome.cursor)
        self._hear(process.shard, welcome.cursor)
        # A process that joins again builds on nothing from before where it is to go on.
        is_heir = before is not None and before != process and before.shard == process.shard
        if is_heir and 0 < hello.cursor < welcome.cursor:
            span = (hello.cursor, welcome.cursor)
            self.holes.append(_Hole(process.learner, process.shard, span))

    def _begin(self, epoch: int, *, keeps: bool) -> None:
        """What waits comes along into a new epoch, or is undone."""
        waiting, self.waiting = self.waiting, {}
        if not keeps:
            for entry in waiting.values():
                self._lose(entry, Reason.ROLLED_BACK, f"before epoch {epoch}")
            return
        self.epoch = epoch
        for key, entry in waiting.items():
            meta = replace(entry.meta, key=renamed(key, epoch))
            self.waiting[meta.key] = replace(entry, meta=meta)

    def _roll_back(self, welcome: Welcome) -> None:
        """What is of an older epoch, and later than where the new one begins, is undone."""
        self.epoch = welcome.epoch
        undone = [key for key, (version, _) in self.merged.items()
                  if version > welcome.versions[key.fragment]]  # fmt: skip
        entries = [self.merged.pop(key)[1] for key in undone]
        entries += [self.waiting.pop(key) for key in list(self.waiting)]
        for entry in entries:
            self._lose(entry, Reason.ROLLED_BACK, f"before epoch {welcome.epoch}")

    def _hear(self, shard: int, cursor: int) -> None:
        self.heard[shard] = max(self.heard[shard], cursor)

    def _entry(self, meta: ContributionMeta, process: _Process) -> _Entry:
        spans = [(meta.cursor_from, meta.cursor_to)]
        for hole in self.holes:
            if (hole.learner, hole.shard) == (process.learner, process.shard):
                spans = [left for span in spans for left in _without(span, hole.span)]
        return _Entry(meta, process.shard, tuple(spans))

    def _wait(self, meta: ContributionMeta, process: _Process | None) -> None:
        entry = self._entry(meta, process or _Process(meta.key.learner, -1))
        self.waiting[meta.key] = entry
        self._hear(entry.shard, meta.cursor_to)
        batches = sum(stop - start for start, stop in entry.spans)
        if batches != meta.steps:
            self.miscounts.append(Miscount(meta.key, meta.steps, batches))

    def _merge(self, event: Merged) -> None:
        if event.epoch is not None and event.epoch < self.epoch:
            return  # It was under way when the run went back, and is of no use.
        for meta in event.order.contributions:
            if meta.key not in self.waiting:
                self._wait(meta, self.newest.get(meta.key.learner))
            entry = self.waiting.pop(meta.key)
            if event.refused is None:
                self.merged[meta.key] = (event.version, entry)
            else:
                self._lose(entry, Reason.REFUSED, event.refused)

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
        for entry in self.waiting.values():
            self._lose(entry, Reason.WAITING, "")
        by_place: dict[Place, list[Interval]] = defaultdict(list)
        for _, entry in self.merged.values():
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
        shard, fragment = place
        # What was trained before the tape begins is known only as far as contributions hold it.
        entries = [(interval.start, interval.stop) for interval in merged]
        entries += [span for span, _, _ in self.lost[place]]
        before = self.before.get(shard, 0)
        first = min((start for start, _ in entries if start < before), default=before)
        left: list[Span] = [(first, self.heard[shard])]
        for interval in merged:
            left = [s for span in left for s in _without(span, (interval.start, interval.stop))]
        gaps: list[Gap] = []
        for lost, reason, detail in self.lost[place]:
            for span in left:
                both = max(span[0], lost[0]), min(span[1], lost[1])
                if both[0] < both[1]:
                    gaps.append(Gap(fragment, shard, *both, reason, detail))
            left = [s for span in left for s in _without(span, lost)]
        last = max((interval.stop for interval in merged), default=0)
        for span in left:
            gaps += self._trained_for_nothing(place, span, is_last=span[0] >= last)
        return sorted(gaps, key=lambda gap: gap.start)

    def _trained_for_nothing(self, place: Place, span: Span, *, is_last: bool) -> list[Gap]:
        """No contribution holds `span`: up to where its last process begins, others had it."""
        shard, fragment = place
        start, stop = span
        begins = [begin for begin in self.begins[shard] if start < begin <= stop]
        middle = max(begins, default=start)
        rest = Reason.UNSENT if is_last else Reason.OVERLAP
        parts = (((start, middle), Reason.CRASH), ((middle, stop), rest))
        return [Gap(fragment, shard, *part, reason) for part, reason in parts if part[0] < part[1]]


def _without(span: Span, hole: Span) -> list[Span]:
    """What is left of a span."""
    parts = (span[0], min(span[1], hole[0])), (max(span[0], hole[1]), span[1])
    if hole[0] >= hole[1]:
        return [span]
    return [part for part in parts if part[0] < part[1]]


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
