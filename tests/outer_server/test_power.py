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
    epoch: int = 1
    asked_epoch: int = 1
    begun_epoch: int = 1
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
                self.asked_epoch = max(self.asked_epoch, epoch)
            case ("asked", epoch):
                self.asked_epoch = epoch
            case ("begun", epoch):
                self.begun_epoch = epoch
            case ("rolled", epoch):
                self.epoch = epoch
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


@pytest.fixture(scope="module", params=[True, False], ids=["journaled", "bare"])
def rolled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(tmp_path_factory.mktemp("rolled"), keep_journal=request.param)
    story.live(2, "1", after_rollback=2)
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
    return Found(found.state, frozenset(found.holdings.payloads), found.reason)


def _wrong_state(story: Story, heard: Heard, found: Found) -> str:
    state = found.state
    if state.generation <= heard.generation or state.next_token <= heard.token:
        return f"generation {state.generation} or a token was given out before"
    if state.epoch < heard.epoch:
        return f"epoch {state.epoch} goes on, and {heard.epoch} had begun"
    if found.lost and state.epoch <= heard.begun_epoch:
        return f"epoch {state.epoch} was begun before"
    lost = [
        f"version {version} of fragment {fragment} is lost"
        for (epoch, fragment), version in heard.versions.items()
        if epoch == state.epoch and version > state.fragments[fragment].version
    ]
    if lost or not story.keep_journal:
        return "; ".join(lost)
    if state.epoch > heard.asked_epoch or found.lost:
        return f"epoch {state.epoch} has begun: {found.lost}"
    for index, fragment in enumerate(state.fragments):
        at = (state.epoch, index, fragment.version)
        if story.digests.get(at, fragment.digest) != fragment.digest:
            return f"version {fragment.version} of fragment {index} has other bits"
    return _wrong_contributions(heard, found)


def _wrong_contributions(heard: Heard, found: Found) -> str:
    state = found.state
    waiting = {meta.key for fragment in state.fragments for meta in fragment.arrived}
    if waiting != found.held:
        return "a contribution waits without its bytes"
    for key in heard.receipts:
        if key.base_version.epoch != state.epoch:
            continue  # Void, since the run went back.
        base = state.learners[key.learner].bases[key.fragment]
        is_merged = state.fragments[key.fragment].version > key.base_version.number
        if base.consumed < key.base_version.number or not (is_merged or key in waiting):
            return f"an acknowledged contribution is lost: {key}"
    if state.rollbacks:
        return ""  # What is void was merged, and the run's own count went back.
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
def test_a_rollback_is_whole_or_was_not(rolled: Story, scratch: Path) -> None:
    marks = [op.data for op in rolled.disk.ops if op.what == "mark"]
    assert ("begun", 2) in marks
    assert ("rolled", 2) in marks
    assert list(moments(rolled, scratch)) == []


@pytest.mark.timeout(400)
def test_no_sync_can_be_left_out(
    journaled: Story, bare: Story, rolled: Story, scratch: Path
) -> None:
    """Of those that the three have; a rollback has some that nothing else has."""
    lucks = (Luck.ALL_LOST, Luck.NAMES_KEPT, Luck.CONTENTS_KEPT)
    stories = (bare, journaled, rolled)
    unneeded = {site for story in stories for site in sites(story.disk.ops)}
    for story in stories:
        for site in sites(story.disk.ops):
            if site in unneeded and any(moments(story, scratch, site, lucks, STRIDE)):
                unneeded.remove(site)
    assert unneeded == set()
