"""A disk that is really full: a small file system, and a file that takes what is left of it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fragments.errors import RefusedError, StorageError
from fragments.records import (
    Adopted,
    Ask,
    Contribution,
    ContributionKey,
    Hello,
    Published,
    RefusalCode,
    Report,
    Role,
    ServerNote,
    Version,
)
from outer_server import history
from outer_server.saver import SnapshotRule
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from tests.support.story import noise
from tests.support.tiny import tiny_birth, tiny_spec

SIZE_KIB = 4096
WAIT_S = 60.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if sys.platform != "linux" or os.geteuid() != 0:
        if os.environ.get("REQUIRE_SITES") == "true":
            pytest.fail("a small file system takes root on Linux; CI must be able to")
        pytest.skip("a small file system takes root on Linux")
    at = tmp_path / "small"
    at.mkdir()
    options = ("-t", "tmpfs", "-o", f"size={SIZE_KIB}k", "none", str(at))
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if mounted.returncode:
        if os.environ.get("REQUIRE_SITES") == "true":
            pytest.fail(f"CI must be able to mount a small file system: {mounted.stderr}")
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr}")
    yield at
    subprocess.run(["umount", "--lazy", str(at)], check=True)


class Learner:
    """Answers what it is asked, and tries again what found no room."""

    def __init__(self, server: OuterServer, name: str) -> None:
        self.server, self.name = server, name
        self.refused = self.published = self.step = 0
        self.acknowledged: list[ContributionKey] = []
        self._waiting: dict[int, Contribution] = {}
        self._notes: queue.SimpleQueue[ServerNote] = queue.SimpleQueue()
        digest = server.describe().layout_digest
        self.lease = server.join(Hello(1, "tiny", digest, name, Role.LEARNER, name)).lease
        for index in range(len(server.state.fragments)):
            self._adopt(index)
        server.attach(self.lease, self._notes.put)

    def go_on(self) -> None:
        """A step, and what there is to answer."""
        self.step += 1
        self.server.report(self.lease, Report(self.step, 16 * self.step, self.step))
        while not self._notes.empty():
            self._hear(self._notes.get())
        for fragment, contribution in list(self._waiting.items()):
            try:
                if not self.server.contribute(self.lease, contribution).duplicate:
                    self.acknowledged.append(contribution.key)
            except StorageError:
                self.refused += 1
                continue
            except RefusedError as error:
                # Asked twice on one base, it has answered already.
                if error.code is not RefusalCode.CONSUMED:
                    raise
            del self._waiting[fragment]

    def _hear(self, note: ServerNote) -> None:
        if isinstance(note, Published):
            self.published += 1
            self._adopt(note.fragment)
        elif isinstance(note, Ask):
            key = ContributionKey(self.name, note.fragment, note.version)
            layout = self.server._directory.layout
            payload = noise(self.server.state.spec, layout, note.fragment, self.step)
            before = self.step - 1
            contribution = Contribution(key, note.version, 1, 16, before, self.step, payload)
            self._waiting[note.fragment] = contribution

    def _adopt(self, index: int) -> None:
        state = self.server.state
        fragment = state.fragments[index]
        at = Version(state.epoch, fragment.version)
        self.server.adopted(self.lease, Adopted(index, at, fragment.digest, self.step))


def _until(learners: tuple[Learner, ...], is_over: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not is_over():
        assert time.monotonic() < give_up_s, what
        for learner in learners:
            learner.go_on()
        time.sleep(0.01)


def _fill(at: Path, left_bytes: int) -> Path:
    """A file beside the run that leaves so many bytes."""
    filler = at / "filler"
    free = os.statvfs(at)
    with filler.open("wb") as file:
        file.write(bytes(free.f_bavail * free.f_frsize - left_bytes))
    return filler


@pytest.fixture
def run(small_disk: Path) -> Path:
    spec = tiny_spec(budget_tokens=1 << 40, sync_interval=2)
    create_run(small_disk / "run", spec, *tiny_birth(spec))
    return small_disk / "run"


def _served(run: Path) -> OuterServer:
    return OuterServer(run, SnapshotRule(every_rounds=10, every_s=0.5))


def _at(server: OuterServer) -> list[tuple[int, str]]:
    return [(each.version, each.digest) for each in server.state.fragments]


def _held_open(run: Path) -> int:
    """How many payload files this process holds open."""
    payloads = str(run / "journal" / "payloads")
    count = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # That of the listing is gone.
            count += str(each.readlink()).startswith(payloads)
    return count


@pytest.mark.parametrize("left_kib", [0, 4, 20, 60, 150])
def test_a_disk_without_room_refuses_contributions_and_then_takes_them(
    run: Path, left_kib: int
) -> None:
    """Whatever runs out of room first: a payload, the log, a snapshot."""
    with _served(run) as server:
        learners = Learner(server, "a"), Learner(server, "b")
        _until(learners, lambda: server.status().rounds_merged >= 3, "rounds with room")
        filler = _fill(run.parent, 1024 * left_kib)
        _until(learners, lambda: bool(server.status().stalled), "no room")
        for _ in range(50):  # and again and again
            for learner in learners:
                learner.go_on()
        assert "No space left" in server.status().stalled or "is full" in server.status().stalled
        assert len(list((run / "journal" / "payloads").iterdir())) < 10
        for learner in learners:
            assert server.updates(learner.lease, 0, None)
        with pytest.raises(StorageError, match="room"):
            Learner(server, "c")
        merged = server.status().rounds_merged
        filler.unlink()
        _until(learners, lambda: server.status().rounds_merged >= merged + 5, "rounds, again")
        assert server.status().stalled == ""
        reached = _at(server)
        assert _held_open(run) <= 1, "those that are full or broken are closed"
    keys = [key for learner in learners for key in learner.acknowledged]
    assert len(set(keys)) == len(keys)
    assert history.replay(run).differences == ()
    with OuterServer(run) as server:
        assert (server.status().epoch, server.status().generation) == (1, 2)
        # Rounds may have closed while it stopped; what nothing was merged into is the same.
        for now, then in zip(_at(server), reached, strict=True):
            assert now[0] > then[0] or now == then


def test_a_server_that_is_stopped_on_a_full_disk_has_lost_nothing(run: Path) -> None:
    with _served(run) as server:
        learners = Learner(server, "a"), Learner(server, "b")
        _until(learners, lambda: server.status().rounds_merged >= 3, "rounds with room")
        filler = _fill(run.parent, 0)
        _until(learners, lambda: bool(server.status().stalled), "no room")
        reached = _at(server)
    assert not server.failed
    filler.unlink()
    with OuterServer(run) as server:
        assert _at(server) == reached
        assert (server.status().epoch, server.status().generation) == (1, 2)
    assert history.replay(run).differences == ()
