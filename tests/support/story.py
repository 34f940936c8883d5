"""A short run, served for real: three learners that send noise."""

from __future__ import annotations

import queue
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fragments.codec import Codec
from fragments.layout import Layout
from fragments.payload import Payload
from fragments.records import (
    Adopted,
    Ask,
    Contribution,
    ContributionKey,
    Goodbye,
    Hello,
    Lease,
    Published,
    RefusalCode,
    Report,
    Role,
    ServerNote,
    Version,
)
from fragments.runspec import RunSpec
from outer_server.saver import SnapshotRule
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from tests.support.power import RecordingDisk
from tests.support.tiny import tiny_birth, tiny_spec

WAIT_S = 60.0


class Story:
    """Three learners that send noise, against a server on a disk that remembers."""

    def __init__(self, root: Path, *, keep_journal: bool) -> None:
        self.disk = RecordingDisk(root)
        self.digests: dict[tuple[int, int, int], str] = {}
        self.run = root / "run"
        self.keep_journal = keep_journal
        self._spec = tiny_spec(budget_tokens=1 << 40, sync_interval=2)
        self._sent: set[ContributionKey] = set()
        self._rng = np.random.default_rng(0)
        # c makes no step that anybody hears of: it is not asked, and what it sends waits.
        self._steps = {"a": 0, "b": 0, "c": 0}
        create_run(self.run, self._spec, *tiny_birth(self._spec), disk=self.disk)
        self.disk.mark("born")

    def live(self, rounds: int, life: str, after_rollback: int = 0) -> None:
        """One server's life, until so many more versions have been published. Then, where
        `after_rollback` is not 0, the run goes back to its beginning, and that many are published.
        """
        with OuterServer(
            self.run, SnapshotRule(every_rounds=2), keep_journal=self.keep_journal, disk=self.disk
        ) as server:
            self._server = server
            status = server.status()
            self.disk.mark(("server", status.generation, status.epoch))
            self._go_on(rounds, life)
            if after_rollback:
                self._next_epoch = server.status().epoch + 1
                self.disk.mark(("asked", self._next_epoch))
                server.admin.roll_back("", up_to_version=0, reason="a story")
                self.disk.mark(("rolled", server.status().epoch))
                self._go_on(after_rollback, f"{life}, again")

    def _go_on(self, rounds: int, life: str) -> None:
        """All join, and step until so many versions more are published."""
        server, epoch = self._server, self._server.status().epoch
        notes: queue.SimpleQueue[tuple[str, ServerNote]] = queue.SimpleQueue()
        self._leases = {name: self._join(name, life) for name in self._steps}
        for name, lease in self._leases.items():
            for index, fragment in enumerate(server.state.fragments):
                at = Version(epoch, fragment.version)
                self.digests[at.epoch, index, at.number] = fragment.digest
                server.adopted(lease, Adopted(index, at, fragment.digest, self._steps[name]))
            server.attach(lease, partial(self._hear, notes, name))
        goal = server.status().rounds_merged + rounds
        while server.status().rounds_merged < goal:
            self._step(notes)

    def _hear(
        self, notes: queue.SimpleQueue[tuple[str, ServerNote]], name: str, note: ServerNote
    ) -> None:
        """From the server's threads. A lease that is lost to a rollback tells of its epoch."""
        if isinstance(note, Goodbye) and note.code is RefusalCode.LEASE_LOST:
            self.disk.mark(("begun", self._next_epoch))
        notes.put((name, note))

    def _join(self, name: str, life: str) -> Lease:
        digest = self._server.describe().layout_digest
        hello = Hello(1, "tiny", digest, name, Role.LEARNER, f"{name}{life}")
        lease = self._server.join(hello).lease
        self._steps[name] = 0
        self.disk.mark(("lease", lease.token))
        return lease

    def _step(self, notes: queue.SimpleQueue[tuple[str, ServerNote]]) -> None:
        """Both learners make a step and answer what they are asked meanwhile."""
        for name, lease in self._leases.items():
            self._steps[name] += 1
            if name == "c":
                continue
            step = self._steps[name]
            self._server.report(lease, Report(step, 16 * step, step))
        waiting = WAIT_S if self._server.state.open_rounds else 0.05
        try:
            while True:
                self._answer(*notes.get(timeout=waiting))
                waiting = 0.02
        except queue.Empty:
            pass

    def _answer(self, name: str, note: ServerNote) -> None:
        server, lease = self._server, self._leases[name]
        if isinstance(note, Published):
            digest = server.state.fragments[note.fragment].digest
            at = note.version
            self.digests[at.epoch, note.fragment, at.number] = digest
            self.disk.mark(("published", at.epoch, note.fragment, at.number))
            server.adopted(lease, Adopted(note.fragment, at, digest, self._steps[name]))
        if isinstance(note, Ask) or (isinstance(note, Published) and name == "c"):
            key = ContributionKey(name, note.fragment, note.version)
            if key in self._sent:  # in an earlier life of the server
                return
            self._sent.add(key)
            contribution = self._contribution(key)
            for _ in range(1 + (note.version.number == 3)):  # one answer comes twice
                server.contribute(lease, contribution)
            self.disk.mark(("receipt", key))

    def _contribution(self, key: ContributionKey) -> Contribution:
        layout = self._server._directory.layout
        seed = int(self._rng.integers(1 << 30))
        payload = noise(self._spec, layout, key.fragment, seed)
        step = self._steps[key.learner]
        return Contribution(key, key.base_version, 1, 16, step - 1, step, payload)


def noise(spec: RunSpec, layout: Layout, fragment: int, seed: int) -> Payload:
    """A contribution's bytes: uniform symbols at a step of 2^-7."""
    part = layout.fragments[fragment]
    rng = np.random.default_rng(seed)
    codes = np.zeros((layout.rows_padded, layout.block), np.int8)
    for slot in part.slots:
        flat = codes[slot.row_start : slot.row_stop].reshape(-1)
        flat[: slot.size] = rng.integers(-7, 7, slot.size)
    steps = np.where(codes.any(axis=1), 0x3C00, 0).astype(np.uint16)
    return Codec.of(spec.codec).encode(part, jnp.asarray(codes), jnp.asarray(steps))
