"""What a run directory tells afterwards: its tape, read as a person would, or run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fragments.disk import REAL_DISK
from fragments.errors import RunDirectoryError
from fragments.payload import Payload
from outer_server.core.events import Effect, Note, Reply
from outer_server.core.intervals import Account, account
from outer_server.core.scheduler import handle
from outer_server.core.state import RunState
from outer_server.parameters import Parameters
from outer_server.replay import Replay
from outer_server.store.journal import TAPE, DurableJournal
from outer_server.store.rundir import RunDirectory, read_run
from outer_server.store.snapshot import Known, Restored, damaged, is_same, known, load_oldest
from outer_server.store.tape import DamagedTapeError, Record, Tape

Progress = Callable[[int, int], None]

Look = Callable[[Record, Replay, Sequence[Note]], None]
"""Told of each event that was run again, where the run is after it, and what it had to say."""


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of the tape, and what the scheduler made of it."""

    record: Record
    reply: Reply
    effects: tuple[Effect, ...]
    state: RunState

    @property
    def notes(self) -> tuple[Note, ...]:
        """What it had to say for the log."""
        return tuple(effect for effect in self.effects if isinstance(effect, Note))


def events(run: Path) -> Iterator[Happened]:
    """What has happened since the oldest snapshot that is kept; weights are not touched, and the
    run may be served meanwhile.

    Raises RunDirectoryError where there is no tape, or nothing of it can be read.
    """
    spec, layout = read_run(run)
    path = run / "journal" / TAPE
    first = _first(run, known(run / "snapshots", spec))
    if not path.exists():
        raise RunDirectoryError(f"{run} has no journal: nothing was served from it yet")
    tape = Tape(REAL_DISK, path)
    state = first.state
    try:
        for record in tape.records(first.position or 0):
            outcome = handle(state, record.event, record.at_s, layout.digest)
            state = outcome.state
            yield Happened(record, outcome.reply, outcome.effects, state)
    except DamagedTapeError as error:
        raise RunDirectoryError(f"{path} can be read up to here: {error}") from error
    finally:
        tape.close()


def data_account(run: Path) -> Account:
    """Which batches came into the weights since the oldest snapshot that is kept, each once, and
    why the others did not. Raises RunDirectoryError as `events`.
    """
    spec, _ = read_run(run)
    begin = _first(run, known(run / "snapshots", spec)).state
    return account(((each.record.event, each.reply, each.effects) for each in events(run)), begin)


def _first(run: Path, snapshots: list[Known]) -> Known:
    placed = [each for each in snapshots if each.position is not None]
    if not placed:
        raise RunDirectoryError(f"{run} has no snapshot that says where its journal goes on")
    return placed[0]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A tape that was run again from the oldest snapshot kept: all versions were computed anew.

    `differences`: sentences, one for each digest, of a version or of a snapshot's state, that came
    out otherwise. `damage`: why the tape could not be read to its end, "" where it could.
    `damaged_snapshots`: sentences, one for each that nobody could go on from.
    """

    snapshot: str
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
    nothing in it is changed.

    `progress` is told of events done, and of how many there are; `look` of each event. Raises
    RunDirectoryError.
    """
    with RunDirectory(run) as directory:
        broken = damaged(directory.snapshots, directory.spec, directory.layout)
        first = load_oldest(directory.snapshots, directory.spec, directory.layout)
        if first is None or not (directory.journal / TAPE).exists():
            raise RunDirectoryError(
                f"{run} has no journal, or no whole snapshot that says where it goes on"
                + "".join(f"; {sentence}" for sentence in broken)
            )
        return replace(_replay(directory, first, progress, look), damaged_snapshots=tuple(broken))


def newest(run: Path) -> Replayed:
    """The newest snapshot and what the tape has after it. Otherwise as `replay`."""
    with RunDirectory(run) as directory:
        return _replay(
            directory, directory.load(), lambda _done, _all: None, lambda _record, _replay, _: None
        )


def _replay(directory: RunDirectory, first: Restored, progress: Progress, look: Look) -> Replayed:
    snapshots = {k.position: k for k in known(directory.snapshots, directory.spec)}
    parameters = Parameters(directory.spec, directory.layout, first.fragments)
    again = Replay(parameters, first.state, first.payloads, directory.load_named)
    differences, done, compared, damage = list[str](), 0, 0, ""
    try:
        for record, payload, last in _records(directory, first.position):
            look(record, again, again.apply(record, payload))
            done += 1
            snapshot = snapshots.get(record.number)
            if snapshot is not None:
                compared += 1
                if not is_same(snapshot.state, again.state):
                    differences.append(f"snapshot {snapshot.name} has another state")
            progress(done, last)
    except DamagedTapeError as error:
        damage = str(error)
    return Replayed(
        snapshot=first.name,
        events=done,
        merges=again.merges,
        snapshots=compared,
        differences=(*again.differences, *differences),
        damage=damage,
        state=again.state,
        parameters=parameters,
    )


def _records(
    directory: RunDirectory, after: int | None
) -> Iterator[tuple[Record, Payload | None, int]]:
    """The events after a snapshot, with payloads, and how many there are; none where it was written
    without a tape.
    """
    if after is None or not (directory.journal / TAPE).exists():
        return
    journal = DurableJournal(directory.disk, directory.journal)
    try:
        for record, payload in journal.records(after):
            yield record, payload, journal.position - after
    finally:
        journal.close()
