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
    from outer_server.core.state import RunState
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
        differing = f"{len(found.differences)} digests differ" if found.differences else ""
        damage = found.damage and f"the journal is damaged: {found.damage}"
        raise DilocoError("; ".join(filter(None, (damage, differing))))
    if found.damaged_snapshots:
        raise DilocoError(
            f"{'; '.join(found.damaged_snapshots)} (passed over here, as by a server)"
        )


def _json(found: Replayed, took_s: float) -> str:
    return json.dumps(
        {
            "snapshot": found.snapshot,
            "from_epoch": found.first.epoch,
            "from_versions": [fragment.version for fragment in found.first.fragments],
            "events": found.events,
            "merges": found.merges,
            "snapshots_whole": found.kept,
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
    since = _versions(found.first)
    what = f"{found.events} events, {found.merges} merges computed anew"
    compared = f"{found.snapshots} later snapshots compared"
    lines = [f"from snapshot {found.snapshot} ({since}): {what}, {compared}, in {took_s} s"]
    lines += found.differences[:10]
    if found.merges == 0:
        lines.append(
            f"no version has come since {since}: there was nothing to compute anew, and all that"
            f" was compared are the values and digests of the snapshots, {found.kept} of them whole"
        )
    elif not found.differences:
        which = "every digest" if not found.damage else "every digest of what could be read"
        lines.append(f"{which} since {since} is what it was")
    lines.append(
        "the journal reaches back to the oldest of the snapshots that are kept: more with"
        " `diloco serve --keep-snapshots`"
    )
    return "\n".join(lines)


def _versions(state: RunState) -> str:
    """The versions of the fragments, in words."""
    numbers = [fragment.version for fragment in state.fragments]
    low, high = min(numbers), max(numbers)
    which = f"version {low}" if low == high else f"versions {low} to {high}"
    return f"{which} of epoch {state.epoch}"


VERB = Verb(
    name="replay",
    summary="compute a run's versions anew from its journal, and compare every digest",
    details=(
        "Run a stopped run's journal again, from the oldest snapshot that is kept: every round is\n"
        "merged anew from the contributions that were stored, and the digest of every version and\n"
        "the state in every later snapshot is compared. Versions older than that snapshot have\n"
        "left the journal (`diloco serve --keep-snapshots` keeps more). Nothing is changed, and\n"
        "the directory may be one that cannot be written.\n\n"
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
