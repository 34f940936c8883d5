"""Power may be cut at any moment: nothing that anybody has heard of is lost, and every sync of the
code is needed for that.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from fragments.errors import DilocoError
from fragments.records import (
    ContributionKey,
)
from outer_server.core.state import RunState
from outer_server.recovery import recover
from outer_server.store.rundir import RunDirectory
from tests.support.crash import SamePlace
from tests.support.power import Luck, Op, Tracker, sites, write_image
from tests.support.story import Story

ROUNDS = 5
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
    recovered: dict[int, Found | str] = {}
    for number, op in enumerate(story.disk.ops):
        tracker.apply(op)
        heard.hear(op)
        if not heard.is_born or number % stride:
            continue
        for luck in lucks:
            image = tracker.image(luck)
            mark = hash(frozenset(image.items()))
            if mark not in recovered:
                recovered[mark] = _recovered(story, image, scratch / "image")
            found = recovered[mark]
            wrong = found if isinstance(found, str) else _wrong_state(story, heard, found)
            if wrong:
                yield f"after {number} ({op.what} {op.path.name} {op.site}), {luck.value}: {wrong}"


class Found(NamedTuple):
    """A run as a server found it: its state, the contributions whose bytes are there, what is lost
    by its own account.
    """

    state: RunState
    held: frozenset[ContributionKey]
    lost: str


def _recovered(story: Story, image: dict[str, bytes | None], place: Path) -> Found | str:
    """What a server makes of an image; or why it cannot."""
    write_image(image, place)
    try:
        with RunDirectory(place / "run", SamePlace()) as directory:
            found = recover(directory, keep_journal=story.keep_journal, take_over=False)
            found.journal.close()
    except DilocoError as error:
        return str(error)
    finally:
        shutil.rmtree(place)
    return Found(found.state, frozenset(found.holdings.payloads), found.lost)


def _wrong_state(story: Story, heard: Heard, found: Found) -> str:
    state = found.state
    if state.generation <= heard.generation or state.next_token <= heard.token:
        return f"generation {state.generation} or a token was given out before"
    if not story.keep_journal:
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
    if waiting != found.held:
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


@pytest.mark.timeout(400)
def test_whatever_a_power_cut_leaves_nothing_is_lost(journaled: Story, scratch: Path) -> None:
    assert sum(op.what == "mark" for op in journaled.disk.ops) > 4 * ROUNDS
    assert list(moments(journaled, scratch)) == []


def test_without_a_journal_what_is_lost_begins_a_new_epoch(bare: Story, scratch: Path) -> None:
    assert list(moments(bare, scratch)) == []


@pytest.mark.timeout(400)
def test_no_sync_can_be_left_out(journaled: Story, bare: Story, scratch: Path) -> None:
    lucks = (Luck.ALL_LOST, Luck.NAMES_KEPT, Luck.CONTENTS_KEPT)
    unneeded = {*sites(journaled.disk.ops), *sites(bare.disk.ops)}
    for story in (bare, journaled):
        for site in sites(story.disk.ops):
            if site in unneeded and any(moments(story, scratch, site, lucks, STRIDE)):
                unneeded.remove(site)
    assert unneeded == set()
