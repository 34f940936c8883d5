"""The referee: reads what a run has left, runs its tape again, and judges.

A process of its own, `python -m harness.chaos.referee REQUEST`, so that it computes as the server
does. Nothing of the run may be under way.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fragments.errors import DilocoError
from fragments.layout import Layout
from fragments.records import ContributionKey, Phase
from fragments.runspec import RunSpec
from harness.chaos.judgement import DataFound, Judgement, LossAt
from harness.chaos.ledger import (
    DROPPED,
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
from fragments.tree import TreeCodec
from harness.programs import load_program
from outer_server.core.events import Contributed, Merged, Note, Started
from outer_server.core.intervals import Account
from outer_server.core.state import RunState
from outer_server.history import data_account, replay
from outer_server.replay import Replay
from outer_server.store.rundir import read_run
from outer_server.store.snapshot import known
from outer_server.store.tape import Record

LOSSES = 40
"""Held-out losses over the run, evenly spaced in trained tokens, beside the last."""


def judge(run_dir: Path, receipts: Sequence[Path], data: str | None) -> Judgement:
    """Judges the run that was served from `run_dir`.

    Raises:
        DilocoError: when its tape does not reach back to its birth, or is damaged.
    """
    spec, layout = read_run(run_dir)
    if not any(each.position == 0 for each in known(run_dir / "snapshots", spec)):
        raise DilocoError(
            f"{run_dir} does not reach back to the run's birth: serve it with --keep-snapshots"
        )
    reading, losses = _Reading(), _Losses(spec, layout, data)

    def look(record: Record, again: Replay, notes: Sequence[Note]) -> None:
        reading.read(record, again, notes)
        losses.look(again)

    replayed = replay(run_dir, look=look)
    if replayed.damage:
        raise DilocoError(f"the tape of {run_dir} is damaged: {replayed.damage}")
    if reading.last is None:
        raise DilocoError(f"the tape of {run_dir} is empty: nothing was served from it")
    losses.last(reading.last)
    state, account = replayed.state, data_account(run_dir)
    verdict = reading.ledger.judge(read_receipts(receipts))
    return Judgement(
        acknowledged=verdict.acknowledged,
        acknowledged_lost=verdict.lost,
        applied_twice=verdict.twice,
        voided=verdict.voided,
        fates=verdict.fates,
        findings=(*verdict.findings, *_broken(account)),
        differences=(*replayed.differences, *reading.differences),
        events=replayed.events,
        starts=reading.starts,
        epochs=state.epoch,
        rollbacks=reading.rollbacks,
        data=_data(account, len(state.fragments)),
        versions=sum(fragment.version for fragment in state.fragments),
        lapsed=reading.lapsed,
        snapshots=replayed.snapshots,
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


def _data(account: Account, fragments: int) -> DataFound:
    gaps: Counter[str] = Counter()
    for gap in account.gaps:
        gaps[str(gap.reason)] += gap.stop - gap.start
    return DataFound(
        fragments=fragments,
        merged=sum(each.stop - each.start for each in account.merged),
        gaps=dict(sorted(gaps.items())),
        overlaps=len(account.overlaps),
        miscounts=len(account.miscounts),
    )


def _broken(account: Account) -> Iterator[str]:
    """Sentences on batches that count twice, or are not what a contribution says."""
    for one, other in account.overlaps:
        where = f"shard {one.shard}, fragment {one.fragment}"
        yield (
            f"{where}: batches {one.start} to {one.stop} of {one.learner} and {other.start} to"
            f" {other.stop} of {other.learner} are both merged"
        )
    for each in account.miscounts:
        yield f"{each.key}: it says {each.steps} steps and holds {each.batches} batches"


@dataclass(slots=True)
class _Reading:
    """Goes through the tape beside the replay."""

    ledger: Ledger = field(default_factory=Ledger)
    last: Replay | None = None
    starts: int = 0
    rollbacks: int = 0
    lapsed: int = 0
    differences: list[str] = field(default_factory=list)
    _waiting: frozenset[ContributionKey] = frozenset()

    def read(self, record: Record, again: Replay, notes: Sequence[Note]) -> None:
        """An event that the replay has just let happen; what it had to say of it."""
        event, state = record.event, again.state
        self.last = again
        self.starts += isinstance(event, Started)
        self.lapsed += sum(note.what == "lost" for note in notes)
        self.differences += [n.reason for n in notes if n.what == "digest_mismatch"]
        if isinstance(event, Contributed) and record.stored is not None:
            stored = record.stored
            self.ledger.accept(event.meta.key, Bytes(stored.crc32c, stored.place.num_bytes))
        waiting = frozenset(_waiting(state))
        gone = self._waiting - waiting
        if any(note.what == "rolled_back" for note in notes):
            self.rollbacks += 1
            self.ledger.roll_back([fragment.version for fragment in state.fragments])
            gone = frozenset()
        # One of an older epoch was under way while the run went back, and is of no use.
        if isinstance(event, Merged) and event.epoch in (None, state.epoch):
            taken = [meta.key for meta in event.order.contributions]
            self.ledger.merge(taken, event.version, event.refused)
            gone -= frozenset(taken)
        for key in gone:
            if _is_dropped(key, notes):
                self.ledger.void(key, DROPPED)
            else:
                self.ledger.drop(key, _reason(key, state, notes))
        self._waiting = waiting


def _waiting(state: RunState) -> Iterator[ContributionKey]:
    for fragment in state.fragments:
        yield from (meta.key for meta in fragment.arrived)
        if fragment.round is not None and fragment.round.order is not None:
            yield from (meta.key for meta in fragment.round.order.contributions)


def _is_dropped(key: ContributionKey, notes: Sequence[Note]) -> bool:
    """Whether an operator has it dropped, with the eviction of who sent it."""
    return any(
        note.what == "evicted" and dict(note.fields).get("learner") == key.learner for note in notes
    )


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

    def __init__(self, spec: RunSpec, layout: Layout, data: str | None) -> None:
        self._program = load_program(spec, data)
        self._params = self._program.init_params(spec.seed)
        self._codec = TreeCodec(layout, self._params)
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
