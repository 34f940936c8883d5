"""Power may be cut at any moment: nothing that anybody has heard of is lost, and every sync of the
code is needed for that.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from fragments.codec import Codec
from fragments.errors import DilocoError
from fragments.records import (
    Adopted,
    Ask,
    Contribution,
    ContributionKey,
    Hello,
    Lease,
    Published,
    Report,
    Role,
    ServerNote,
    Version,
)
from outer_server.engine import SnapshotRule
from outer_server.recovery import Recovered, recover
from outer_server.server import OuterServer
from outer_server.store.rundir import RunDirectory, create_run
from tests.support.crash import SamePlace
from tests.support.power import Luck, Op, RecordingDisk, Tracker, sites, write_image
from tests.support.tiny import tiny_birth, tiny_spec

ROUNDS = 6
STRIDE = 3
WAIT_S = 60.0


@dataclass
class Heard:
    """What the world outside the server knows at some moment."""

    is_born: bool = False
    generation: int = 0
    epoch: int = 0
    token: int = 0
    versions: dict[tuple[int, int], int] = field(default_factory=dict)
    receipts: list[ContributionKey] = field(default_factory=list)

    def hear(self, op: Op) -> None:
        """Take in a mark."""
        match op.data:
            case "born":
                self.is_born = True
            case ("server", generation, epoch):
                self.generation, self.epoch = generation, epoch
            case ("lease", token):
                self.token = token
            case ("published", epoch, fragment, number):
                self.versions[epoch, fragment] = number
            case ("receipt", key):
                self.receipts.append(key)


class Story:
    """Three learners that send noise, against a server on a disk that remembers."""

    def __init__(self, root: Path, *, keep_journal: bool) -> None:
        self.disk = RecordingDisk(root)
        self.digests: dict[tuple[int, int, int], str] = {}
        self._run = root / "run"
        self._keep_journal = keep_journal
        self._spec = tiny_spec(budget_tokens=1 << 40, sync_interval=2)
        self._sent: set[ContributionKey] = set()
        self._rng = np.random.default_rng(0)
        # c makes no step that anybody hears of: it is not asked, and what it sends waits.
        self._steps = {"a": 0, "b": 0, "c": 0}
        create_run(self._run, self._spec, *tiny_birth(self._spec), disk=self.disk)
        self.disk.mark("born")

    def live(self, rounds: int, life: str) -> None:
        """One server's life, until so many more versions have been published."""
        with OuterServer(
            self._run, SnapshotRule(every_rounds=2), keep_journal=self._keep_journal, disk=self.disk
        ) as server:
            self._server = server
            status = server.status()
            self.disk.mark(("server", status.generation, status.epoch))
            notes: queue.SimpleQueue[tuple[str, ServerNote]] = queue.SimpleQueue()
            self._leases = {name: self._join(name, life) for name in self._steps}
            for name, lease in self._leases.items():
                for index, fragment in enumerate(server.state.fragments):
                    at = Version(status.epoch, fragment.version)
                    self.digests[at.epoch, index, at.number] = fragment.digest
                    server.adopted(lease, Adopted(index, at, fragment.digest, self._steps[name]))
                server.attach(lease, lambda note, name=name: notes.put((name, note)))
            goal = status.rounds_merged + rounds
            while server.status().rounds_merged < goal:
                self._step(notes)

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
        part = layout.fragments[key.fragment]
        codes = np.zeros((layout.rows_padded, layout.block), np.int8)
        codes[:1, : part.num_values] = self._rng.integers(-7, 7, (1, part.num_values))
        steps = np.where(codes.any(axis=1), 0x3C00, 0).astype(np.uint16)
        payload = Codec.of(self._spec.codec).encode(part, jnp.asarray(codes), jnp.asarray(steps))
        step = self._steps[key.learner]
        return Contribution(key, key.base_version, 1, 16, step - 1, step, payload)


@pytest.fixture(scope="module")
def journaled(tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(tmp_path_factory.mktemp("journaled"), keep_journal=True)
    story.live(ROUNDS, "1")
    story.live(ROUNDS // 2, "2")
    return story


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(tmp_path_factory.mktemp("bare"), keep_journal=False)
    story.live(ROUNDS, "1")
    return story


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Where images are made: in memory, where there is such a place, since nothing is cut there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as place:
        yield Path(place)


def moments(
    story: Story,
    scratch: Path,
    ignored: str = "",
    lucks: tuple[Luck, ...] = tuple(Luck),
    stride: int = 1,
) -> Iterator[str]:
    """For every moment, or one in `stride`, and each luck: what is wrong with what is found."""
    tracker, heard = Tracker(story.disk.root, ignored), Heard()
    seen: set[int] = set()
    for number, op in enumerate(story.disk.ops):
        tracker.apply(op)
        heard.hear(op)
        if not heard.is_born or number % stride:
            continue
        for luck in lucks:
            image = tracker.image(luck)
            mark = hash((frozenset(image.items()), len(heard.receipts), len(heard.versions)))
            if mark in seen:
                continue
            seen.add(mark)
            place = scratch / "image"
            write_image(image, place)
            wrong = _wrong(story, heard, place)
            shutil.rmtree(place)
            if wrong:
                yield f"after {number} ({op.what} {op.path.name} {op.site}), {luck.value}: {wrong}"


def _wrong(story: Story, heard: Heard, place: Path) -> str:
    keep_journal = story._keep_journal
    try:
        with RunDirectory(place / "run", SamePlace()) as directory:
            found = recover(directory, keep_journal=keep_journal, take_over=False)
            found.journal.close()
    except DilocoError as error:
        return str(error)
    return _wrong_state(story, heard, found, keep_journal=keep_journal)


def _wrong_state(story: Story, heard: Heard, found: Recovered, *, keep_journal: bool) -> str:
    state = found.state
    if state.generation <= heard.generation or state.next_token <= heard.token:
        return f"generation {state.generation} or a token was given out before"
    if not keep_journal:
        is_lost = any(v > state.fragments[p].version for (_, p), v in heard.versions.items())
        return "a version is lost without a new epoch" if is_lost and state.epoch == 1 else ""
    if state.epoch != 1:
        return f"epoch {state.epoch} has begun: {found.lost}"
    for index, fragment in enumerate(state.fragments):
        if fragment.version < heard.versions.get((1, index), 0):
            return f"version {heard.versions[1, index]} of fragment {index} is lost"
        digest = story.digests.get((1, index, fragment.version), fragment.digest)
        if digest != fragment.digest:
            return f"version {fragment.version} of fragment {index} has other bits"
    waiting = {meta.key for fragment in state.fragments for meta in fragment.arrived}
    if waiting != set(found.holdings.payloads):
        return "a contribution waits without its bytes"
    for key in heard.receipts:
        base = state.learners[key.learner].bases[key.fragment]
        is_merged = state.fragments[key.fragment].version > key.base_version.number
        if base.consumed < key.base_version.number or not (is_merged or key in waiting):
            return f"an acknowledged contribution is lost: {key}"
    merged = sum(record.tally.contributions_merged for record in state.learners.values())
    pushed = state.tokens_pushed // 16
    if merged + len(waiting) != pushed:
        return f"{merged} merged and {len(waiting)} waiting of {pushed} contributions"
    return ""


def test_whatever_a_power_cut_leaves_nothing_is_lost(journaled: Story, scratch: Path) -> None:
    assert sum(op.what == "mark" for op in journaled.disk.ops) > 4 * ROUNDS
    assert list(moments(journaled, scratch)) == []


def test_without_a_journal_what_is_lost_begins_a_new_epoch(bare: Story, scratch: Path) -> None:
    assert list(moments(bare, scratch)) == []


def test_no_sync_can_be_left_out(journaled: Story, bare: Story, scratch: Path) -> None:
    lucks = (Luck.ALL_LOST, Luck.NAMES_KEPT, Luck.CONTENTS_KEPT)
    unneeded = {*sites(journaled.disk.ops), *sites(bare.disk.ops)}
    for story in (bare, journaled):
        for site in sites(story.disk.ops):
            if site in unneeded and any(moments(story, scratch, site, lucks, STRIDE)):
                unneeded.remove(site)
    assert unneeded == set()
