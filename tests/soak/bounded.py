"""A long small run: what its directory takes of the disk must not grow with its rounds.

    python -m tests.soak.bounded [ROUNDS]

Two learners answer every ask with noise of 40,000 parameters, as fast as rounds come.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import queue
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import structlog

from fragments.layout import Layout, TensorSpec, build_layout
from fragments.records import (
    PROTOCOL_VERSION,
    Adopted,
    Ask,
    Contribution,
    ContributionKey,
    Hello,
    Published,
    Report,
    Role,
    ServerNote,
    Version,
)
from fragments.runspec import RunSpec
from outer_server import history
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from tests.support.story import noise

FRAGMENTS = 2
LOOKS = 20
WAIT_S = 60.0
_TOKENS = 16


def main(rounds: int) -> int:
    """Prints the sizes as they come, and whether the second half took more than the first."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    spec = RunSpec.model_validate(
        {
            "run_id": "bounded",
            "fragments": FRAGMENTS,
            "sync_interval": FRAGMENTS,
            "budget_tokens": 1 << 60,
        }
    )
    layout = build_layout(
        [TensorSpec(f"t{i}", (100, 200), "float32") for i in range(FRAGMENTS)], FRAGMENTS, 64, "b"
    )
    values = [np.zeros((layout.rows_padded, layout.block), np.float32)] * FRAGMENTS
    sizes: list[int] = []
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        create_run(run, spec, layout, values)
        _say("# Disk: what many rounds leave\n")
        _say("`make soak-disk`: two learners, 40,000 parameters, rounds as fast as they come; what")
        _say("the run directory takes.\n")
        _say("| rounds | directory, MB | tape, MB | payloads, MB | snapshots, MB | seconds |")
        _say("|---|---|---|---|---|---|")
        with OuterServer(run) as server:
            _Driver(server, spec, layout).run(rounds, partial(_look, run, sizes))
        found = history.replay(run)
        _say(f"\nreplayed: {found.merges} merges, {len(found.differences)} digests differ")
    half = len(sizes) // 2
    first, second = max(sizes[:half]), max(sizes[half:])
    _say(f"\nmost in the first half {first / 1e6:.1f} MB, in the second {second / 1e6:.1f} MB")
    return 0 if second <= 1.1 * first and not found.differences else 1


class _Driver:
    def __init__(self, server: OuterServer, spec: RunSpec, layout: Layout) -> None:
        self._server = server
        self._notes: queue.SimpleQueue[tuple[str, ServerNote]] = queue.SimpleQueue()
        self._payloads = [noise(spec, layout, p, p) for p in range(FRAGMENTS)]
        self._steps = {"a": 0, "b": 0}
        digest = server.describe().layout_digest
        self._leases = {
            name: server.join(
                Hello(PROTOCOL_VERSION, spec.run_id, digest, name, Role.LEARNER, name)
            ).lease
            for name in self._steps
        }

    def run(self, rounds: int, look: Callable[[int], None]) -> None:
        for name, lease in self._leases.items():
            for p, fragment in enumerate(self._server.state.fragments):
                self._server.adopted(lease, Adopted(p, Version(1, 0), fragment.digest, 0))
            self._server.attach(lease, partial(self._hear, name))
            self._step(name)
        looked = 0
        while (merged := self._server.state.rounds_merged) < rounds:
            self._answer(*self._notes.get(timeout=WAIT_S))
            if merged * LOOKS // rounds > looked:
                looked = merged * LOOKS // rounds
                look(merged)

    def _hear(self, name: str, note: ServerNote) -> None:
        self._notes.put((name, note))

    def _step(self, name: str) -> None:
        self._steps[name] += 1
        step = self._steps[name]
        self._server.report(self._leases[name], Report(step, _TOKENS * step, step))

    def _answer(self, name: str, note: ServerNote) -> None:
        lease, step = self._leases[name], self._steps[name]
        if isinstance(note, Ask):
            key = ContributionKey(name, note.fragment, note.version)
            payload = self._payloads[note.fragment]
            self._server.contribute(
                lease, Contribution(key, note.version, 1, _TOKENS, step - 1, step, payload)
            )
        if isinstance(note, Published):
            digest = self._server.state.fragments[note.fragment].digest
            self._server.adopted(lease, Adopted(note.fragment, note.version, digest, step))
            self._step(name)


def _look(run: Path, sizes: list[int], merged: int) -> None:
    parts = [_bytes(run / "journal", "tape*"), _bytes(run / "journal" / "payloads")]
    parts.append(_bytes(run / "snapshots"))
    sizes.append(_bytes(run))
    told = " | ".join(f"{size / 1e6:.2f}" for size in (sizes[-1], *parts))
    _say(f"| {merged} | {told} | {time.process_time():.0f} |")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _bytes(directory: Path, names: str = "*") -> int:
    """Of the files in it and below; what goes meanwhile counts nothing."""
    total = 0
    # The server writes and removes as we look: os.walk passes over directories that are gone.
    for place, _, files in os.walk(directory):
        for name in fnmatch.filter(files, names):
            with suppress(FileNotFoundError):
                total += (Path(place) / name).stat().st_size
    return total


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
