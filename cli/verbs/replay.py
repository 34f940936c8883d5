"""`diloco replay`: computes a run's versions anew, and compares them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from cli.keys import Positional, VerbSettings
from cli.verb import Verb
from fragments.errors import DilocoError

if TYPE_CHECKING:
    from outer_server.history import Replayed


class ReplaySettings(VerbSettings):
    """Which run."""

    run_dir: Annotated[Path, Positional] = Field(description="directory that `diloco init` made")
    json_: bool = Field(default=False, alias="json", description="print JSON")


def run(settings: ReplaySettings) -> None:
    """Replays and tells the outcome.

    Raises:
        RunDirectoryError: when the run is being served, or cannot be read.
        DilocoError: when anything came out otherwise.
    """
    from harness.environment import use_server_arithmetic

    use_server_arithmetic(os.environ)
    from harness.terminal import counted
    from outer_server.history import replay

    began_s = time.monotonic()
    with counted("events", to_stderr=settings.json_) as progress:
        found = replay(settings.run_dir, progress)
    took_s = round(time.monotonic() - began_s, 2)
    print(_json(found, took_s) if settings.json_ else _text(found, took_s))
    if found.damage or found.differences:
        raise DilocoError(found.damage or f"{len(found.differences)} digests differ")
    if found.damaged_snapshots:
        raise DilocoError(f"{found.damaged_snapshots[0]}; the server goes on from another one")


def _json(found: Replayed, took_s: float) -> str:
    return json.dumps(
        {
            "snapshot": found.snapshot,
            "events": found.events,
            "merges": found.merges,
            "snapshots_compared": found.snapshots,
            "digest_mismatches": len(found.differences),
            "differences": found.differences[:10],
            "damage": found.damage,
            "damaged_snapshots": found.damaged_snapshots,
            "epoch": found.state.epoch,
            "versions": [fragment.version for fragment in found.state.fragments],
            "seconds": took_s,
        },
        indent=1,
    )


def _text(found: Replayed, took_s: float) -> str:
    what = f"{found.events} events, {found.merges} merges computed anew"
    compared = f"{found.snapshots} snapshots compared"
    lines = [f"from snapshot {found.snapshot}: {what}, {compared}, in {took_s} s"]
    lines += [*found.differences[:10], *found.damaged_snapshots]
    if found.damage:
        lines.append(f"the journal is damaged: {found.damage}")
    elif not found.differences:
        lines.append("every digest is what it was")
    return "\n".join(lines)


VERB = Verb(
    name="replay",
    summary="compute a run's versions anew from its journal, and compare every digest",
    details=(
        "Run a stopped run's journal again, from the oldest snapshot that is kept: every round is\n"
        "merged anew from the contributions that were stored, and the digest of every version and\n"
        "the state in every later snapshot is compared. Nothing is changed.\n\n"
        "On a processor of another kind the bits may differ in the last place; it says so."
    ),
    examples=(
        "examples:\n"
        "  diloco replay runs/mine\n"
        "  diloco replay runs/mine --json | jq .digest_mismatches\n\n"
        "exit codes: 1 a digest differs, or the journal or a snapshot is damaged; 5 run directory"
    ),
    settings=ReplaySettings,
    run=run,
)
