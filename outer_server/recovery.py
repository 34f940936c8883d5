"""How a server comes back: the newest whole snapshot, and the tape after it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog

from fragments.errors import RunDirectoryError, StorageError
from outer_server.core.events import Started
from outer_server.core.resume import resume
from outer_server.core.scheduler import handle
from outer_server.core.state import RunState
from outer_server.holdings import Holdings
from outer_server.parameters import Parameters
from outer_server.replay import Replay
from outer_server.saver import Mark
from outer_server.store.journal import (
    TAPE,
    DurableJournal,
    Journal,
    NoJournal,
    is_missing,
    lost_events,
)
from outer_server.store.rundir import RunDirectory, ServerRecord
from outer_server.store.snapshot import Restored, Snapshot, numbered
from outer_server.store.tape import DamagedTapeError, Entry
from outer_server.store.unwritten import Unwritten

TAKE_OVER_GENERATIONS = 1000
"""Generations that a copy is ahead of what it was copied from, so that learners which have seen it
go back to no server that runs on by mistake."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """A run as its server goes on with it.

    `reason`: why an epoch began, "" where none did.
    `newest`: how far the newest snapshot reaches.
    """

    state: RunState
    parameters: Parameters
    holdings: Holdings
    journal: Journal
    newest: Mark
    reason: str


HOLD_SHARE = 0.5
"""Of a lease: so long a server that starts waits for learners to come back before a round opens."""


def recover(directory: RunDirectory, *, keep_journal: bool, take_over: bool) -> Recovered:
    """Load the run and begin a new generation, durably, before anything is served.

    After whatever the journal has, the versions, their digests, the leases and the contributions
    that wait are what they were. Where something is missing that was acknowledged or published, or
    may be, a new epoch begins, in which nothing of what learners hold counts. A copy begins one
    too, since its original may have gone on. Contributions that wait come along.

    Raises RunDirectoryError, also for a copy of a directory without `take_over`, and where nothing
    can be read or written for the moment; then nothing that matters has changed.
    """
    try:
        return _recover(directory, keep_journal=keep_journal, take_over=take_over)
    except (StorageError, OSError) as error:
        cause = error.__cause__ if isinstance(error, StorageError) else error
        raise RunDirectoryError(
            f"{directory.path} cannot be read or written ({cause or error}); nothing is lost: see "
            "to its disk (room, rights, is it mounted?), and start the server again"
        ) from error


def _recover(directory: RunDirectory, *, keep_journal: bool, take_over: bool) -> Recovered:
    began_s = time.monotonic()
    record = _record(directory, take_over=take_over)
    _check_place(directory, record, take_over=take_over)
    restored = directory.load()
    parameters = Parameters(directory.spec, directory.layout, restored.fragments)
    # What merges replace must not stay in memory.
    restored = replace(restored, fragments=())
    replay = Replay(parameters, restored.state, restored.payloads, directory.load_named)
    journal: Journal = NoJournal()
    lost = ""
    record = _looked_at(directory, record, restored, take_over=take_over)
    if keep_journal or directory.journal.is_dir():
        durable = DurableJournal(directory.disk, directory.journal, mend=True)
        played = _play(directory, durable, restored, replay)
        lost = played.lost
        if played.lost:
            # Before anything is cut, after which nothing would tell that it was there.
            directory.write_record(replace(record, lost=played.lost))
        if played.cut_after is not None:
            removed, kept = durable.cut_after(played.cut_after)
            _log.warning(
                "tape_cut", after=played.cut_after, removed=removed, reason=played.lost, kept=kept
            )
            lost = f"{lost}; {_counted(removed)}"
        if keep_journal:
            journal = durable
        else:
            durable.close()
    lost = lost or record.lost or _missing(record, restored, replay.state)
    digests = replay.digests() if replay.unsettled else ()
    epochs = max(record.epoch, replay.state.epoch)
    reason = lost or ("it goes on from a copy" if take_over else "")
    if reason:
        epochs = max(epochs, record.epoch_begun)
    generation = max(record.generation, replay.state.generation)
    started = Started(
        generation + (TAKE_OVER_GENERATIONS if take_over else 1),
        epochs + 1 if reason else epochs,
        digests,
        reason and f"{reason}; {_fate(replay.state, is_kept=not digests)}",
        # Where this machine computes other bits, their bases are not what is here.
        keeps=not digests,
        hold_s=directory.spec.lease_ttl_s * HOLD_SHARE,
    )
    state = handle(replay.state, started, 0.0, directory.layout.digest).state
    replay.holdings.renew(state, keeps=started.keeps)
    # Before server.json: the tape may know of a server that is not noted there, but not less.
    journal.write([Entry(0.0, time.time(), started, None)], durable=True)
    directory.write_record(
        ServerRecord(
            started.generation,
            started.epoch,
            clean=False,
            has_journal=keep_journal,
            place=directory.place,
        )
    )
    if reason:
        rounds = state.rounds_merged
        _log.warning(
            "new_epoch", epoch=state.epoch, goes_on_after_rounds=rounds, reason=started.reason
        )
    took_s = round(time.monotonic() - began_s, 2)
    _log.info(
        "recovered",
        snapshot=restored.name,
        merges=replay.merges,
        rounds=state.rounds_merged,
        tokens=state.tokens_trained,
        waiting=sum(len(fragment.arrived) for fragment in state.fragments),
        leases=len(state.live_learners),
        seconds=took_s,
    )
    # A rollback on the tape may have gone back before it.
    rounds = min(restored.state.rounds_merged, state.rounds_merged)
    newest = Mark(state.epoch, rounds, restored.position or 0)
    return Recovered(state, parameters, replay.holdings, journal, newest, reason)


def _fate(state: RunState, *, is_kept: bool) -> str:
    """What becomes of the contributions that wait when an epoch begins."""
    parked = resume(state, state.generation, state.epoch).fragments
    waiting = sum(len(fragment.arrived) for fragment in parked)
    return f"contributions that waited: {waiting}, {'kept' if is_kept else 'void'}"


def _counted(removed: Mapping[str, int]) -> str:
    """What was removed from the tape, in words."""
    if not removed:
        return "how many events are missing nobody can tell"
    contributions, versions = removed.get("Contributed", 0), removed.get("Merged", 0)
    return (
        f"removed from the journal: {sum(removed.values())} events"
        f" (contributions: {contributions}, versions: {versions})"
    )


def _record(directory: RunDirectory, *, take_over: bool) -> ServerRecord:
    """What the last server has noted; with `take_over` also where that cannot be read."""
    if not take_over:
        path = directory.path
        return directory.record(f"; go on in a new epoch with `diloco serve {path} --take-over`")
    try:
        return directory.record()
    except RunDirectoryError as error:
        _log.warning("server_json_damaged", reason=str(error))
        return ServerRecord(0, 0, clean=False, lost=_UNNOTED)


_UNNOTED = "server.json, where the last server noted how it ended, is missing or damaged"


def _looked_at(
    directory: RunDirectory, record: ServerRecord, restored: Restored, *, take_over: bool
) -> ServerRecord:
    """What the journal tells before it is opened, noted durably: a start that does not come to its
    end must leave that to the next. RunDirectoryError where there is none that ought to be.
    """
    if record.has_journal and not take_over and is_missing(directory.journal):
        raise RunDirectoryError(
            f"{directory.journal / TAPE} is missing or empty: what was acknowledged and published "
            f"since snapshot {restored.name} is on it. Put it back; or go on from that snapshot, "
            f"without what came after it: diloco serve {directory.path} --take-over"
        )
    lost = lost_events(directory.journal)
    if not lost:
        return record
    record = replace(record, lost=lost)
    directory.write_record(record)
    return record


def _check_place(directory: RunDirectory, record: ServerRecord, *, take_over: bool) -> None:
    if record.place in (None, directory.place) or take_over:
        return
    raise RunDirectoryError(
        f"{directory.path} is a copy of a run directory, or has been moved to another disk: what "
        "the original has served since is not in it. Where no server goes on with the original, go "
        f"on with this one: diloco serve {directory.path} --take-over"
    )


class _Played(NamedTuple):
    """What came of a tape. `lost`: why not all is there, or "". `cut_after`: what follows on this
    event is to be removed; None for nothing.
    """

    lost: str
    cut_after: int | None = None


def _play(
    directory: RunDirectory, journal: DurableJournal, restored: Restored, replay: Replay
) -> _Played:
    """Let all happen that the tape has after the snapshot."""
    if restored.position is None:
        # Written by a server that kept no tape: what is there is older. From now on one is kept.
        journal.clear()
        values, payloads = Unwritten(replay.parameters.fragments), dict(restored.payloads)
        directory.save(Snapshot(restored.state, values, payloads, journal.position))
        return _Played(journal.damage)
    try:
        for record, payload in journal.records(restored.position):
            replay.apply(record, payload)
    except DamagedTapeError as error:
        return _Played(f"the journal is damaged ({error})", error.last_whole)
    if replay.unsettled:
        _log.warning("not_the_same_bits", first=replay.unsettled[0], all=len(replay.unsettled))
        return _Played("this machine does not compute the bits that were published")
    return _Played(journal.damage)


def _missing(record: ServerRecord, restored: Restored, state: RunState) -> str:
    """Why something that was acknowledged or published may be missing from `state`, or ""."""
    if record.has_journal:
        if state.generation < record.generation:
            return "the journal of the last server is missing"
        return ""
    if not record.clean:
        return "the last server kept no journal and did not end in order: versions may be missing"
    is_last = restored.is_newest and record.snapshot in (None, restored.name)
    if is_last and record.epoch == state.epoch:
        return ""
    return f"snapshot {record.snapshot}, which the last server left, is missing or damaged"


def stopped(directory: RunDirectory, epoch: int, *, has_journal: bool) -> None:
    """Note, after the last snapshot, that nothing was left unsaved; where that cannot be noted, the
    next start takes the stop for a crash, which changes nothing where there is a journal. Raises
    OSError where there is none.
    """
    record = directory.record()
    newest = numbered(directory.snapshots)[-1].name
    try:
        directory.write_record(replace(record, epoch=epoch, clean=True, snapshot=newest))
    except OSError as error:
        if not has_journal:
            raise
        _log.error("stop_not_noted", reason=str(error))
