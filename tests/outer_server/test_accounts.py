"""Whatever befalls a run, its account of data is true, wherever its tape begins."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fragments.records import Adopted, ContributionKey, Version
from outer_server.core.events import (
    Effect,
    Event,
    Evict,
    HasAdopted,
    Leave,
    Merged,
    Point,
    Release,
    Reply,
    Started,
    Tick,
)
from outer_server.core.intervals import Account, Gap, Interval, Reason, account
from outer_server.core.resume import renamed
from outer_server.core.state import RunState
from tests.support.islands import FRAGMENTS, TOKENS, Island
from tests.support.taped import Taped

NAMES = "abc"
Batch = tuple[int, int, int]
"""(shard, fragment, number)."""

Told = tuple[Interval | Gap, tuple[str, object]]
"""Batches and their fate."""

Tape = Sequence[tuple[Event, Reply, Sequence[Effect]]]


def _fates(found: Account) -> dict[Batch, tuple[str, object]]:
    """What became of each batch; it is told of each once."""
    fates: dict[Batch, tuple[str, object]] = {}
    merged: list[Told] = [(i, ("merged", (i.learner, i.base))) for i in found.merged]
    gaps: list[Told] = [(gap, (str(gap.reason), gap.detail)) for gap in found.gaps]
    for span, fate in (*merged, *gaps):
        for batch in range(span.start, span.stop):
            where = span.shard, span.fragment, batch
            assert where not in fates, f"{where}: {fate} and {fates[where]}"
            fates[where] = fate
    return fates


def _key(interval: Interval) -> ContributionKey:
    return ContributionKey(interval.learner, interval.fragment, interval.base)


class _History:
    """A run to which anything may happen. Each snapshot begins an account of its own."""

    def __init__(self, **spec: object) -> None:
        self.run = Taped(**{"budget_tokens": 1 << 30, "sync_interval": 2} | spec)
        self.truth: dict[ContributionKey, frozenset[int]] = {}
        self.islands = [Island(name, self.run, self.truth) for name in NAMES]
        self.points: list[Point] = []
        self.begins: list[tuple[RunState, int]] = []
        self.snapshot()
        for island in self.islands:
            self.join(island)

    def befalls(self, what: str, whom: int, number: int) -> None:
        """What happens next: `number` says how much or which, where that is asked."""
        island, fragment = self.islands[whom], number % FRAGMENTS
        match what:
            case "exchange":
                self.exchange(island, 1 + number % 3)
            case "train" if island.is_placed:
                island.train(1 + number % 4, is_told=number % 3 > 0)
            case "answer":
                island.answer(fragment)
            case "adopt" if island.is_placed:
                island.adopt(fragment)
            case "checkpoint" if island.is_placed:
                island.kept = island.now
            case "die":
                island.die(with_checkpoint=number % 3 > 0)
                self.join(island)
            case "come back" if island.is_placed:
                self.come_back(island, number)
            case "join again":
                self.join(island)
            case "repeat":
                island.repeat()
            case "lose versions":
                self.lose_versions(island, fragment)
            case _:
                self.happens(what, island.name, number)

    def happens(self, what: str, name: str, number: int) -> None:
        """Of what befalls a server, or a name."""
        match what:
            case "leave":
                self.run.tell(Leave(name, self.run.token(name), ""))
            case "evict":
                self.run.tell(Evict(name, "", drop=number % 2 > 0))
                self.run.tell(Release(name, ""))
            case "merge" if self.run.orders:
                self.run.finish_merge("no finite result" if number % 3 == 0 else None)
            case "lapse":
                self.run.now_s += 1000.0
                self.run.tell(Tick())
            case "snapshot":
                self.snapshot()
            case "roll back":
                self.run.roll_back(self.points[number % len(self.points)])
            case "restart":
                self.start(number % 3)
            case _:
                pass

    def join(self, island: Island) -> None:
        if island.join():
            for fragment in range(FRAGMENTS):
                island.adopt(fragment)

    def come_back(self, island: Island, number: int) -> None:
        """With what it had trained before its checkpoint, and none of what it had after."""
        island.train(1 + number % 3, is_told=True)
        island.kept = island.now
        island.train(number % 4, is_told=True)
        island.die(with_checkpoint=True)
        self.join(island)
        island.train(number % 3, is_told=True)

    def exchange(self, island: Island, steps: int) -> None:
        """What a learner does when all is well."""
        live = {record.name for record in self.run.state.live_learners}
        if not island.is_placed or island.name not in live:
            self.join(island)
        if island.is_placed:
            island.train(steps, is_told=True)
            for fragment in range(FRAGMENTS):
                island.answer(fragment)
            self.run.merge_all()
            for fragment in range(FRAGMENTS):
                island.adopt(fragment)

    def snapshot(self) -> None:
        self.points.append(self.run.point(f"{len(self.points):06d}"))
        self.begins.append((self.run.snapshot(), len(self.run.tape)))

    def start(self, kind: int) -> None:
        """Go on after a stop, with a copy, or with other bits."""
        state = self.run.state
        digests = (f"x{state.epoch}", f"y{state.epoch}") if kind == 2 else ()
        started = Started(state.generation + 1, state.epoch + (kind > 0), digests, keeps=kind == 1)
        self.run.orders.clear()
        self.run.tell(started)
        self.rename(state.epoch)

    def lose_versions(self, island: Island, fragment: int) -> None:
        """It says that it trains on what is not known here."""
        epoch, newest = self.run.state.epoch, self.run.state.fragments[fragment].version
        adopted = Adopted(fragment, Version(epoch, newest + 1), "?", 0)
        self.run.tell(HasAdopted(island.name, self.run.token(island.name), adopted))
        self.rename(epoch)

    def rename(self, before: int) -> None:
        """What waits has come along."""
        epoch = self.run.state.epoch
        for key, batches in list(self.truth.items()):
            if key.base_version.epoch == before:
                self.truth[renamed(key, epoch)] = batches


WHAT = [
    *["exchange"] * 8,
    *["train", "answer", "come back", "snapshot", "roll back"] * 2,
    *["checkpoint", "die"],
    *["adopt", "merge", "restart", "join again", "leave", "repeat", "evict", "lapse"],
    "lose versions",
]
STORIES = st.lists(
    st.tuples(st.sampled_from(WHAT), st.integers(0, len(NAMES) - 1), st.integers(0, 1 << 20)),
    min_size=8,
    max_size=40,
)


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    story=STORIES,
    max_learners=st.sampled_from([2, 3]),
    quorum=st.integers(1, 2),
    late=st.sampled_from(["join", "join", "drop"]),
    staleness_bound=st.sampled_from([0, 4]),
)
def test_the_account_of_data_is_true_wherever_its_tape_begins(
    story: list[tuple[str, int, int]], **spec: object
) -> None:
    history = _History(**spec)
    for what, whom, number in story:
        history.befalls(what, whom, number)
    whole = history.run.account()
    fates = _fates(whole)
    _is_true(history, whole, fates)
    for state, seen in history.begins:
        found = account(history.run.tape[seen:], state)
        assert not found.overlaps
        assert not found.miscounts
        _is_part(found, fates, whole, history.run.tape[seen:])


def _is_true(history: _History, whole: Account, fates: dict[Batch, tuple[str, object]]) -> None:
    assert not whole.overlaps
    assert not whole.miscounts
    state = history.run.state
    merged: dict[ContributionKey, set[int]] = {}
    for each in whole.merged:
        merged.setdefault(_key(each), set()).update(range(each.start, each.stop))
    assert merged == {key: history.truth[key] for key in merged}
    assert TOKENS * sum(map(len, merged.values())) == state.tokens_merged
    heard: dict[int, int] = {}
    for record in state.learners.values():
        heard[record.shard_index] = max(heard.get(record.shard_index, 0), record.cursor)
    everything = {
        (shard, fragment, batch)
        for shard, cursor in heard.items()
        for fragment in range(FRAGMENTS)
        for batch in range(cursor)
    }
    assert set(fates) == everything
    explained = {Reason.REFUSED, Reason.ROLLED_BACK}
    assert all(gap.detail for gap in whole.gaps if gap.reason in explained)


def _is_part(
    found: Account, fates: dict[Batch, tuple[str, object]], whole: Account, tape: Tape
) -> None:
    """It says of every batch what the whole account says: of all since its tape begins, and of
    those before that all that have been merged since.
    """
    part = _fates(found)
    assert part == {where: fates.get(where) for where in part}
    begins = dict(found.begins)
    since = {where for where in fates if where[2] >= begins.get(where[0], 0)}
    keys = {
        meta.key
        for event, _, _ in tape
        if isinstance(event, Merged)
        for meta in event.order.contributions
    }
    since |= {
        (each.shard, each.fragment, batch)
        for each in whole.merged
        if _key(each) in keys
        for batch in range(each.start, each.stop)
    }
    assert since <= set(part)
