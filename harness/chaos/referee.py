"""The referee: reads what a run has left, runs its tape again, and judges.

A process of its own, `python -m harness.chaos.referee REQUEST`, so that it computes as the server
does. Nothing of the run may be under way.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fragments.errors import DilocoError
from fragments.records import ContributionKey, Phase
from harness.chaos.judgement import Judgement, LossAt
from harness.chaos.ledger import (
    LEFT_OVER,
    UNEXPLAINED,
    VOID,
    Bytes,
    Ledger,
    read_receipts,
)
from harness.environment import use_server_arithmetic

if __name__ == "__main__":
    # Before anything below imports jax.
    use_server_arithmetic(os.environ)

from fragments.digest import combine
from fragments.disk import REAL_DISK
from fragments.tree import TreeCodec
from harness.programs import load_program
from outer_server.core.events import Contributed, Merged, Note, Started
from outer_server.core.state import RunState
from outer_server.parameters import Parameters
from outer_server.replay import Replay
from outer_server.store.journal import DurableJournal
from outer_server.store.rundir import RunDirectory
from outer_server.store.snapshot import Known, Restored, is_same, known, load_oldest
from outer_server.store.tape import DamagedTapeError, Record

LOSSES = 40
"""Held-out losses over the run, evenly spaced in trained tokens, beside the last."""


def judge(run_dir: Path, receipts: Sequence[Path], data: str | None) -> Judgement:
    """Judges the run that was served from `run_dir`.

    Raises:
        DilocoError: when its tape does not reach back to its birth, or is damaged.
    """
    with RunDirectory(run_dir) as directory:
        born = _birth(directory)
        snapshots = {each.position: each for each in known(directory.snapshots, directory.spec)}
        parameters = Parameters(directory.spec, directory.layout, born.fragments)
        replay = Replay(parameters, born.state, born.payloads, directory.load_named)
        losses = _Losses(directory, data)
        reading = _Reading(replay, Ledger())
        journal = DurableJournal(REAL_DISK, directory.journal)
        try:
            for record, payload in journal.records(0):
                reading.read(record, reading.replay.apply(record, payload))
                losses.look(replay)
                if record.number in snapshots:
                    reading.compare(snapshots[record.number])
        except DamagedTapeError as error:
            raise DilocoError(f"the tape of {run_dir} is damaged: {error}") from error
        finally:
            journal.close()
        losses.last(replay)
    return _judgement(reading, losses, receipts)


def _judgement(reading: _Reading, losses: _Losses, receipts: Sequence[Path]) -> Judgement:
    state = reading.replay.state
    verdict = reading.ledger.judge(read_receipts(receipts))
    return Judgement(
        acknowledged=verdict.acknowledged,
        acknowledged_lost=verdict.lost,
        applied_twice=verdict.twice,
        fates=verdict.fates,
        findings=verdict.findings,
        differences=(*reading.replay.differences, *reading.differences),
        events=reading.events,
        starts=reading.starts,
        epochs=state.epoch,
        versions=sum(fragment.version for fragment in state.fragments),
        lapsed=reading.lapsed,
        snapshots=reading.snapshots,
        finished=state.phase is Phase.FINISHED,
        tokens_trained=state.tokens_trained,
        tokens_merged=state.tokens_merged // len(state.fragments),
        weights_digest=combine(
            (state.epoch, index, fragment.version, fragment.digest)
            for index, fragment in enumerate(state.fragments)
        ),
        losses=tuple(losses.found),
        loss_unit=losses.unit,
    )


def _birth(directory: RunDirectory) -> Restored:
    """The snapshot of the run's birth. Raises DilocoError where it is not the oldest."""
    oldest = load_oldest(directory.snapshots, directory.spec, directory.layout)
    if oldest is None or oldest.position != 0:
        raise DilocoError(
            f"{directory.path} does not reach back to the run's birth: serve it with"
            " --keep-snapshots"
        )
    return oldest


@dataclass(slots=True)
class _Reading:
    """Goes through the tape beside the replay."""

    replay: Replay
    ledger: Ledger
    events: int = 0
    starts: int = 0
    lapsed: int = 0
    snapshots: int = 0
    differences: list[str] = field(default_factory=list)
    _waiting: frozenset[ContributionKey] = frozenset()

    def read(self, record: Record, notes: Sequence[Note]) -> None:
        """An event that the replay has just let happen; what it had to say of it."""
        event, state = record.event, self.replay.state
        self.events += 1
        self.starts += isinstance(event, Started)
        self.lapsed += sum(note.what == "lost" for note in notes)
        self.differences += [n.reason for n in notes if n.what == "digest_mismatch"]
        if isinstance(event, Contributed) and record.stored is not None:
            stored = record.stored
            self.ledger.accept(event.meta.key, Bytes(stored.crc32c, stored.place.num_bytes))
        waiting = frozenset(_waiting(state))
        gone = self._waiting - waiting
        if isinstance(event, Merged):
            taken = [meta.key for meta in event.order.contributions]
            self.ledger.merge(taken, event.refused)
            gone -= frozenset(taken)
        for key in gone:
            self.ledger.drop(key, _reason(key, state, notes))
        self._waiting = waiting

    def compare(self, there: Known) -> None:
        """A snapshot is of this moment: did the server have the same state?"""
        self.snapshots += 1
        if not is_same(there.state, self.replay.state):
            self.differences.append(f"snapshot {there.name} has another state than the tape")


def _waiting(state: RunState) -> Iterator[ContributionKey]:
    for fragment in state.fragments:
        yield from (meta.key for meta in fragment.arrived)
        if fragment.round is not None and fragment.round.order is not None:
            yield from (meta.key for meta in fragment.round.order.contributions)


def _reason(key: ContributionKey, state: RunState, notes: Sequence[Note]) -> str:
    """Why a contribution waits no more that no round has taken."""
    if key.base_version.epoch != state.epoch:
        return VOID
    for note in notes:
        told: dict[str, Any] = dict(note.fields)
        whose = (told.get("learner"), told.get("fragment"))
        if note.what == "contribution_refused" and whose == (key.learner, key.fragment):
            return "refused: stale"
    return LEFT_OVER if state.phase is Phase.FINISHED else UNEXPLAINED


class _Losses:
    """Held-out losses of the global weights on the way."""

    def __init__(self, directory: RunDirectory, data: str | None) -> None:
        spec = directory.spec
        self._program = load_program(spec, data)
        self._params = self._program.init_params(spec.seed)
        self._codec = TreeCodec(directory.layout, self._params)
        self._spacing = spec.budget_tokens / LOSSES
        self.unit = self._program.loss_unit
        self.found: list[LossAt] = []

    def look(self, replay: Replay) -> None:
        """Evaluate, if it is time again."""
        if replay.state.tokens_trained >= len(self.found) * self._spacing:
            self.last(replay)

    def last(self, replay: Replay) -> None:
        """Evaluate."""
        params = self._params
        for index, values in enumerate(replay.holdings.published):
            params = self._codec.replace(index, params, values.broadcast_BxN)
        loss = self._program.evaluate(params)
        self.found.append(LossAt(tokens=replay.state.tokens_trained, loss=loss))


def main(request: str) -> None:
    """Writes the judgement; says why there is none, with exit code 1."""
    asked = json.loads(request)
    receipts = [Path(path) for path in asked["receipts"]]
    try:
        found = judge(Path(asked["run_dir"]), receipts, asked["data"])
    except DilocoError as error:
        sys.exit(str(error))
    Path(asked["out"]).write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
