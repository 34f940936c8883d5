"""Checkpoints on a real disk: the same bits again, the newest whole one, and nobody else's."""

from __future__ import annotations

import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structlog
from safetensors.numpy import load_file

from fragments.digest import digest_hex
from fragments.errors import CheckpointError
from fragments.layout import Layout
from fragments.records import Version
from learner.checkpoint import KEPT, Checkpoints, Writer
from learner.held import Base, Checkpoint, Completed
from learner.keeper import Keeper
from learner.program import Shard
from tests.support.power import Luck, RecordingDisk, Tracker, sites, write_image
from tests.support.tiny import TinyProgram, tiny_birth, tiny_spec

PROGRAM = TinyProgram()
PARAMS = PROGRAM.init_params(0)


def _inner(seed: float = 0.0) -> Any:
    """As odd as an optimizer's state may be."""
    return {
        "count": jnp.int32(7),
        "mean": (jnp.full((3, 2), seed, jnp.bfloat16), jnp.zeros((0, 4), jnp.float32)),
        "key": jax.random.key(int(seed)),
        "none": None,
    }


def _checkpoint(step: int, layout: Layout) -> Checkpoint:
    _, values = tiny_birth(tiny_spec())
    value_BxN = jnp.asarray(values[0])
    base = Base(Version(2, 5), value_BxN, digest_hex(value_BxN), step - 1, 16 * (step - 1), step)
    params = jax.tree.map(lambda leaf: leaf + jnp.float32(step), PARAMS)
    bases = (base, *(None,) * (len(layout.fragments) - 1))
    at = Completed(step, 16 * step, step + 3, params, bases, Shard(1, 4))
    return Checkpoint(at, _inner(float(step)))


@pytest.fixture
def layout() -> Layout:
    found, _ = tiny_birth(tiny_spec())
    assert isinstance(found, Layout)
    return found


@pytest.fixture
def store(tmp_path: Path, layout: Layout) -> Checkpoints:
    return Checkpoints(tmp_path / "kept", "tiny", layout, "eu")


def _writer(token: int = 1) -> Writer:
    return Writer(token, "abc")


def _newest(store: Checkpoints) -> Checkpoint | None:
    return store.newest(PARAMS, lambda _: _inner())


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(_numbers(leaf)) for leaf in jax.tree.leaves(tree)]


def _numbers(leaf: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def test_what_was_written_is_read_to_the_bit(
    tmp_path: Path, store: Checkpoints, layout: Layout
) -> None:
    assert _newest(store) is None
    written = _checkpoint(12, layout)
    path = store.write(_writer(), written)
    found = _newest(store)
    assert found is not None
    for one, two in zip(_leaves(written.inner), _leaves(found.inner), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    for one, two in zip(
        _leaves(written.completed.params), _leaves(found.completed.params), strict=True
    ):
        np.testing.assert_array_equal(one, two)
    base, expected = found.completed.bases[0], written.completed.bases[0]
    assert base is not None
    assert expected is not None
    np.testing.assert_array_equal(np.asarray(base.value_BxN), np.asarray(expected.value_BxN))
    assert replace(base, value_BxN=expected.value_BxN) == expected
    nothing: dict[str, Any] = {"params": None, "bases": ()}
    assert replace(found.completed, **nothing) == replace(written.completed, **nothing)
    # Without this program: by the library, under the names of the model's tensors.
    tensors = load_file(path / "state.safetensors")
    np.testing.assert_array_equal(tensors["params/['w']"], np.asarray(PARAMS["w"]) + 12)
    # A key is a key again.
    jax.random.normal(found.inner["key"], ())


def test_the_newest_of_the_newest_process_is_read_and_few_are_kept(
    tmp_path: Path, store: Checkpoints, layout: Layout
) -> None:
    for token, step in ((1, 900), (1, 1000), (2, 30), (10, 4), (10, 20)):
        store.write(_writer(token), _checkpoint(step, layout))
    # A process that was fenced off meanwhile writes its last.
    store.write(_writer(1), _checkpoint(1100, layout))
    assert len(list((tmp_path / "kept").iterdir())) == KEPT
    found = _newest(store)
    assert found is not None
    assert found.completed.step == 20


@pytest.mark.parametrize("name", ["manifest.json", "state.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_one_is_passed_over_with_a_warning(
    tmp_path: Path, store: Checkpoints, layout: Layout, name: str, damage: str
) -> None:
    store.write(_writer(), _checkpoint(5, layout))
    path = store.write(_writer(), _checkpoint(9, layout)) / name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        flipped = bytes([data[-9] ^ 64]) + data[-8:]
        path.write_bytes(data[:-9] + (flipped if damage == "flip" else b""))
    # A write that was cut short is no checkpoint, and does not stay.
    (tmp_path / "kept" / ".1-000000011.new").mkdir()
    with structlog.testing.capture_logs() as logs:
        found = _newest(store)
    assert found is not None
    assert found.completed.step == 5
    assert [log["event"] for log in logs] == ["checkpoint_passed_over"]
    assert not list((tmp_path / "kept").glob(".*"))


def test_a_manifest_that_reads_well_but_says_something_else_is_passed_over(
    store: Checkpoints, layout: Layout
) -> None:
    path = store.write(_writer(), _checkpoint(3, layout)) / "manifest.json"
    said = path.read_text()
    assert '"cursor": 3' in said
    path.write_text(said.replace('"cursor": 3', '"cursor": 7'))
    assert _newest(store) is None
    path.write_text(said)
    assert _newest(store) is not None


def test_another_inner_optimizer_is_passed_over(store: Checkpoints, layout: Layout) -> None:
    store.write(_writer(), _checkpoint(5, layout))
    with structlog.testing.capture_logs() as logs:
        assert store.newest(PARAMS, lambda _: {"count": jnp.float32(0)}) is None
        assert store.newest(PARAMS, lambda _: {"more": jnp.float32(0)}) is None
    assert "inner/['count'] is int32" in logs[0]["reason"]


@pytest.mark.parametrize("what", ["run", "learner", "layout"])
def test_anothers_checkpoint_is_refused_with_a_sentence(
    tmp_path: Path, store: Checkpoints, layout: Layout, what: str
) -> None:
    store.write(_writer(), _checkpoint(5, layout))
    run_id, learner = "other" if what == "run" else "tiny", "us" if what == "learner" else "eu"
    here = replace(layout, identity="other") if what == "layout" else layout
    other = Checkpoints(tmp_path / "kept", run_id, here, learner)
    with pytest.raises(CheckpointError, match=f"is a checkpoint of {what} .*--checkpoint-dir"):
        _newest(other)


@contextmanager
def _no_room(num_bytes: int) -> Iterator[None]:
    """Files of this process end after so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_costs_a_checkpoint_and_no_older_one(
    tmp_path: Path, store: Checkpoints, layout: Layout
) -> None:
    store.write(_writer(), _checkpoint(5, layout))
    with _no_room(100), pytest.raises(CheckpointError, match="no checkpoint can be written"):
        store.write(_writer(), _checkpoint(9, layout))
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["1-000000005"]
    store.write(_writer(), _checkpoint(9, layout))
    found = _newest(store)
    assert found is not None
    assert found.completed.step == 9


class Life:
    """Checkpoints on a disk that remembers all that was done to it."""

    def __init__(self, root: Path, layout: Layout) -> None:
        self.disk, self.layout = RecordingDisk(root), layout
        store = Checkpoints(root / "kept", "tiny", layout, "eu", self.disk)
        for step in range(1, KEPT + 3):
            store.write(_writer(), _checkpoint(step, layout))
            self.disk.mark(step)

    def wrong(self, scratch: Path, ignored: str = "") -> Iterator[str]:
        """For every moment of it and each luck: what is not as it should be after a power cut."""
        tracker, told = Tracker(self.disk.root, ignored), 0
        for number, op in enumerate(self.disk.ops):
            tracker.apply(op)
            told = op.data if op.what == "mark" else told
            for luck in Luck:
                place = scratch / "image"
                write_image(tracker.image(luck), place)
                found = _newest(Checkpoints(place / "kept", "tiny", self.layout, "eu"))
                shutil.rmtree(place)
                if told > (found.completed.step if found is not None else 0):
                    yield f"after {number} ({op.what} {op.path.name}), {luck.value}: {told} is lost"


def test_a_power_cut_costs_no_checkpoint_that_was_finished(tmp_path: Path, layout: Layout) -> None:
    (tmp_path / "disk").mkdir()
    life = Life(tmp_path / "disk", layout)
    assert not list(life.wrong(tmp_path))
    needless = [site for site in sites(life.disk.ops) if not any(life.wrong(tmp_path, site))]
    assert not needless, "a sync that could be left out"


class SlowStore(Checkpoints):
    """Writes when it is let."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.may, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.steps: list[int] = []

    def write(self, writer: Writer, checkpoint: Checkpoint) -> Path:
        self.may.acquire()
        self.steps.append(checkpoint.completed.step)
        try:
            return super().write(writer, checkpoint)
        finally:
            self.done.release()


def test_training_waits_for_no_checkpoint_and_for_no_disk(tmp_path: Path, layout: Layout) -> None:
    (tmp_path / "file").write_text("in the way")
    store = SlowStore(tmp_path / "file", "tiny", layout, "eu")
    now_s = 0.0
    keeper = Keeper(store, 10.0, _writer, clock=lambda: now_s)
    keeper.start()

    def complete(step: int) -> None:
        kept = _checkpoint(step, layout)
        keeper.completed(kept.completed, kept.inner)

    for step in range(1, 40):
        now_s += 1.0
        complete(step)
    with structlog.testing.capture_logs() as logs:
        # The first was due at step 10, and the disk has not taken it yet: no other was begun.
        store.may.release()
        assert store.done.acquire(timeout=20)
        # It failed. The next one is taken once the writer is free again.
        store.may.release()
        for step in range(40, 10_000):
            complete(step)
            if store.done.acquire(timeout=0.01):
                break
        keeper.keep(_checkpoint(20_000, layout))
        store.may.release()
        keeper.stop()
    assert store.steps[0] == 10
    assert store.steps[1] >= 40
    assert store.steps[-1] == 20_000
    assert {log["event"] for log in logs} == {"checkpoint_failed"}
