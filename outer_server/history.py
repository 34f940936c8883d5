"""What a run directory tells afterwards: its tape, read as a person would, or run again.

Nothing of the directory is changed, and nothing in it need be writable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from fragments.errors import RunDirectoryError
from fragments.payload import Payload
from fragments.runspec import RunSpec
from outer_server.core.events import Effect, Event, Note, Reply
from outer_server.core.intervals import Account, account
from outer_server.core.scheduler import handle
from outer_server.core.state import RunState
from outer_server.parameters import Parameters
from outer_server.replay import Replay
from outer_server.store.journal import TAPE
from outer_server.store.past import Past
from outer_server.store.rundir import RunDirectory, read_run
from outer_server.store.snapshot import (
    Known,
    Restored,
    damaged,
    is_same,
    known,
    load_whole,
    numbered,
)
from outer_server.store.tape import DamagedTapeError, Record

Progress = Callable[[int, int], None]

Look = Callable[[Record, Replay, Sequence[Note]], None]
"""Told of each event that was run again, where the run is after it, and what it had to say."""


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of the tape, and what the scheduler made of it.

    `is_bare`: what came before it cannot be read, so that nobody knows what was made of it, and
    `state` is an older one.
    """

    record: Record
    reply: Reply
    effects: tuple[Effect, ...]
    state: RunState
    is_bare: bool = False

    @property
    def notes(self) -> tuple[Note, ...]:
        """What it had to say for the log."""
        return tuple(effect for effect in self.effects if isinstance(effect, Note))


@dataclass(frozen=True, slots=True)
class Hole:
    """Events that a tape has no more: from number `first` to before `until`, None for all.

    `goes_on`: the state in which all that follows is known again. `newest`: the newest snapshot
    that can be read, and whether it was taken after the hole: a server needs nothing older.
    `is_lost`: all that was before is gone with it, as where a journal was lost and begun anew.
    """

    first: int
    until: int | None
    reason: str
    goes_on: RunState | None
    newest: str
    is_covered: bool
    is_lost: bool

    def __str__(self) -> str:
        if self.is_lost and self.until:
            return f"the journal begins at event {self.until}: {self.first} to before it are lost"
        which = f"event {self.first}"
        if self.until is None:
            which += " and what follows on it"
        elif self.until - 1 > self.first:
            which = f"events {self.first} to {self.until - 1}"
        return f"{which} cannot be read ({self.reason})"

    @property
    def meaning(self) -> str:
        """What that is for the run, and what to do."""
        if self.is_covered:
            return (
                f"the run is whole: a server goes on from snapshot {self.newest}, which is newer;"
                " the journal lets go of the damage as snapshots that are older leave"
            )
        return (
            "the run goes on, but a server that is started cuts the journal there, and begins a new"
            f" epoch at what it has up to then, after snapshot {self.newest}: put the journal back"
            " from a copy before, or, while the run is still served, have `diloco snapshot` write"
            " a snapshot that is newer than the damage"
        )


def _raise(hole: Hole) -> None:
    raise RunDirectoryError(f"{hole}: {hole.meaning}")


def events(run: Path, at_hole: Callable[[Hole], None] = _raise) -> Iterator[Happened]:
    """What has happened since the oldest snapshot that is kept; weights are not touched, and the
    run may be served meanwhile.

    Where events cannot be read, `at_hole` is told, and then comes what follows: up to the next
    snapshot bare. Raises RunDirectoryError where there is no tape, or nothing of it can be read,
    and, by default, at the first hole.
    """
    spec, layout = read_run(run)
    snapshots = _placed(run, spec)
    with closing(_past(run)) as past:
        begin: Known | None = snapshots[0]
        while begin is not None:
            state, position = begin.state, begin.position or 0
            try:
                for record in past.records(position):
                    outcome = handle(state, record.event, record.at_s, layout.digest)
                    state = outcome.state
                    yield Happened(record, outcome.reply, outcome.effects, state)
                return
            except DamagedTapeError as error:
                again, begin = _after(past, snapshots, error)
                hole = _hole(past, error, again, begin, snapshots[-1])
            at_hole(hole)
            if again is not None:
                yield from _bare(past, again, begin, state)


def _bare(past: Past, again: int, until: Known | None, state: RunState) -> Iterator[Happened]:
    for record in past.records(again - 1):
        if until is not None and record.number > (until.position or 0):
            return
        yield Happened(record, None, (), state, is_bare=True)


def _after(
    past: Past, snapshots: Sequence[Known], error: DamagedTapeError
) -> tuple[int | None, Known | None]:
    """From which event on all can be read again, and the first snapshot that was taken then."""
    again = past.whole_again(error.last_whole + 1)
    if again is None:
        return None, None
    least = max(error.last_whole + 1, again - 1)
    later = (each for each in snapshots if (each.position or 0) >= least)
    return again, next(later, None)


def _hole(
    past: Past,
    error: DamagedTapeError,
    again: int | None,
    begin: Known | None,
    newest: Known,
) -> Hole:
    return Hole(
        first=error.last_whole + 1,
        until=again,
        reason=str(error),
        goes_on=None if begin is None else begin.state,
        newest=newest.name,
        is_covered=(newest.position or 0) > error.last_whole,
        is_lost=past.first > error.last_whole + 1,
    )


def data_account(run: Path) -> Account:
    """Which batches came into the weights since the oldest snapshot that is kept, each once, and
    why the others did not; after a hole in the tape, since the snapshot that follows on it. Raises
    RunDirectoryError as `events`, for a hole after which there is none.
    """
    spec, _ = read_run(run)
    begin = _placed(run, spec)[0].state
    told: list[tuple[Event, Reply, Sequence[Effect]]] = []

    def at_hole(hole: Hole) -> None:
        nonlocal begin
        if hole.goes_on is None:
            _raise(hole)
        else:
            begin = hole.goes_on
            told.clear()

    for each in events(run, at_hole):
        if not each.is_bare:
            told.append((each.record.event, each.reply, each.effects))  # noqa: PERF401  at_hole empties it on the way
    return account(told, begin)


def _past(run: Path) -> Past:
    if not (run / "journal").exists():
        raise RunDirectoryError(f"{run} has no journal: nothing was served from it yet")
    return Past(run)


def _placed(run: Path, spec: RunSpec) -> list[Known]:
    """The snapshots that say where the tape goes on after them, oldest first."""
    placed = [each for each in known(run / "snapshots", spec) if each.position is not None]
    if not placed:
        raise RunDirectoryError(f"{run / 'snapshots'} has {_NO_PLACE}")
    return placed


_NO_PLACE = (
    "no whole snapshot that says where the journal goes on: put one back from a backup, or a copy"
    " of the run directory"
)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A tape that was run again from the oldest snapshot kept: all versions were computed anew.

    `snapshot`: where it began, `first` its state; `kept`: whole snapshots, whose values have the
    digests of their states. `differences`: sentences, one for each digest, of a version or of a
    snapshot's state, that came out otherwise. `damage`: which part of the tape could not be read,
    "" where all could. `damaged_snapshots`: sentences, one for each that nobody could go on from.
    """

    snapshot: str
    first: RunState
    kept: int
    events: int
    merges: int
    snapshots: int
    differences: tuple[str, ...]
    damage: str
    state: RunState
    parameters: Parameters
    damaged_snapshots: tuple[str, ...] = ()


def replay(
    run: Path,
    progress: Progress = lambda _done, _all: None,
    look: Look = lambda _record, _replay, _notes: None,
) -> Replayed:
    """Run the tape again from the oldest snapshot. No server may use the directory meanwhile, and
    nothing in it is changed. After events that cannot be read it goes on from the next snapshot.

    `progress` is told of events done, and of how many there are; `look` of each event. Raises
    RunDirectoryError.
    """
    with RunDirectory(run, only_reads=True) as directory, closing(_past(run)) as past:
        broken = damaged(directory.snapshots, directory.spec, directory.layout)
        whole = load_whole(directory.snapshots, directory.spec, directory.layout, 0)
        if whole is None:
            reasons = "".join(f"; {sentence}" for sentence in broken)
            raise RunDirectoryError(f"{directory.snapshots} has {_NO_PLACE}{reasons}")
        found = _replay(directory, past, whole, progress, look)
        while found.stopped is not None:
            again, _ = _after(past, (), found.stopped)
            if again is None:
                break
            least = max(found.stopped.last_whole + 1, again - 1)
            whole = load_whole(directory.snapshots, directory.spec, directory.layout, least)
            if whole is None:
                break
            found = found.joined(_replay(directory, past, whole, progress, look), again)
        kept = len(numbered(directory.snapshots)) - len(broken)
        return replace(found.replayed, kept=kept, damaged_snapshots=tuple(broken))


def newest(run: Path) -> Replayed:
    """The newest snapshot and what the tape has after it. Otherwise as `replay`."""
    with RunDirectory(run, only_reads=True) as directory:
        first = directory.load()
        progress, look = (lambda _done, _all: None), (lambda _record, _replay, _: None)
        if first.position is None or not (directory.journal / TAPE).exists():
            return _replay(directory, None, first, progress, look).replayed
        with closing(Past(run)) as past:
            return _replay(directory, past, first, progress, look).replayed


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What came of a tape up to where it could not be read, if anywhere."""

    replayed: Replayed
    stopped: DamagedTapeError | None

    def joined(self, later: _Stretch, again: int) -> _Stretch:
        """With what came of it from event `again` on."""
        one, two = self.replayed, later.replayed
        last = again - 1
        between = f"events up to {last} cannot be read ({one.damage})"
        return _Stretch(
            replace(
                two,
                snapshot=one.snapshot,
                first=one.first,
                events=one.events + two.events,
                merges=one.merges + two.merges,
                snapshots=one.snapshots + two.snapshots,
                differences=(*one.differences, *two.differences),
                damage=f"{between}; {two.damage}" if two.damage else between,
            ),
            later.stopped,
        )


def _replay(
    directory: RunDirectory, past: Past | None, first: Restored, progress: Progress, look: Look
) -> _Stretch:
    snapshots = {k.position: k for k in known(directory.snapshots, directory.spec)}
    parameters = Parameters(directory.spec, directory.layout, first.fragments)
    again = Replay(parameters, first.state, first.payloads, directory.load_named)
    differences, done, compared = list[str](), 0, 0
    stopped: DamagedTapeError | None = None
    try:
        for record, payload, last in _records(past, first.position):
            look(record, again, again.apply(record, payload))
            done += 1
            snapshot = snapshots.get(record.number)
            if snapshot is not None:
                compared += 1
                if not is_same(snapshot.state, again.state):
                    differences.append(f"snapshot {snapshot.name} has another state")
            progress(done, last)
    except DamagedTapeError as error:
        stopped = error
    return _Stretch(
        Replayed(
            snapshot=first.name,
            first=first.state,
            kept=len(snapshots),
            events=done,
            merges=again.merges,
            snapshots=compared,
            differences=(*again.differences, *differences),
            damage="" if stopped is None else str(stopped),
            state=again.state,
            parameters=parameters,
        ),
        stopped,
    )


def _records(past: Past | None, after: int | None) -> Iterator[tuple[Record, Payload | None, int]]:
    """The events after a snapshot, with payloads, and how many there are; none where it was written
    without a tape.
    """
    if past is None or after is None:
        return
    for record in past.records(after):
        yield record, past.payload(record), past.last - after
