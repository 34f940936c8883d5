"""What the referee of a chaos run finds, and how one is asked. Imports no jax."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from harness.environment import module


class LossAt(BaseModel):
    """A held-out loss of the global weights."""

    model_config = ConfigDict(frozen=True)

    tokens: int
    loss: float


class DataFound(BaseModel):
    """The account of the training data (`outer_server.core.intervals`), in batches summed over
    fragments. `gaps`: batches that were trained and did not come into a fragment, by reason.
    `overlaps`: pairs of merged intervals that share a batch. `miscounts`: contributions that hold
    other batches than they say.
    """

    model_config = ConfigDict(frozen=True)

    fragments: int
    merged: int
    gaps: dict[str, int]
    overlaps: int
    miscounts: int


class Judgement(BaseModel):
    """What the referee found. `differences`: of digests, a sentence each. `voided`: acknowledged,
    and undone because an operator asked for it.

    `starts` of servers; `epochs` beyond the first and those of `rollbacks` mean that something was
    lost. `lapsed`: leases that ended by silence. `snapshots`: whose state was compared with the
    tape's. `weights_digest`: at the tape's end, as the status has it.
    """

    model_config = ConfigDict(frozen=True)

    acknowledged: int
    acknowledged_lost: int
    applied_twice: int
    voided: int
    fates: dict[str, int]
    findings: tuple[str, ...]
    differences: tuple[str, ...]
    events: int
    starts: int
    epochs: int
    rollbacks: int
    data: DataFound
    versions: int
    lapsed: int
    snapshots: int
    finished: bool
    tokens_trained: int
    tokens_merged: int
    weights_digest: str
    losses: tuple[LossAt, ...]
    loss_unit: str


def referee_words(
    run_dir: Path, receipts: Sequence[Path], data: str | None, out: Path
) -> tuple[str, ...]:
    """The argument vector of a referee that writes its judgement to `out`."""
    request = {
        "run_dir": str(run_dir),
        "receipts": [str(path) for path in receipts],
        "data": data,
        "out": str(out),
    }
    return module("harness.chaos.referee", json.dumps(request))
