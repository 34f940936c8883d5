"""What a snapshot takes while it is written, and what is written where."""

from __future__ import annotations

import json
import threading
import tracemalloc
import weakref
from dataclasses import replace
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from fragments.disk import REAL_DISK
from fragments.errors import RunDirectoryError
from fragments.layout import Layout, TensorSpec, build_layout
from fragments.tensors import Tensor, TensorWriter, check
from outer_server.core.state import Round, new_state
from outer_server.core.step import FragmentParameters
from outer_server.parameters import Parameters
from outer_server.store import snapshot
from outer_server.store.rundir import create_run, read_run
from outer_server.store.snapshot import Snapshot, known, load_newest, oldest_position
from outer_server.store.unwritten import Unwritten
from tests.support.tiny import tiny_birth, tiny_spec

BLOCK = 64
TENSORS = 6


def small_layout() -> Layout:
    """Three fragments of two tensors each; none fills its last row."""
    specs = [TensorSpec(f"t{i}", (3000, 33), "float32") for i in range(TENSORS)]
    return build_layout(specs, 3, BLOCK, "small")


def random_parameters(layout: Layout, seed: int = 0) -> Parameters:
    draw = np.random.default_rng(seed)
    values = []
    for part in layout.fragments:
        value = np.zeros((layout.rows_padded, layout.block), np.float32)
        for slot in part.slots:
            flat = value[slot.row_start : slot.row_stop].reshape(-1)
            flat[: slot.size] = draw.normal(size=slot.size)
        values.append(value)
    return Parameters.newborn(tiny_spec(fragments=3), layout, values)


def test_what_is_written_piece_by_piece_the_library_reads(tmp_path: Path) -> None:
    one, two = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5, dtype=np.int8)
    none, single = np.zeros((0, 4), np.float32), np.array(7, np.int32)
    written: dict[str, np.ndarray] = {"one": one, "two": two, "none": none, "single": single}
    pieces = [
        [Tensor("one", "float32", (2, 3)), Tensor("single", "int32", ())],
        [Tensor("none", "float32", (0, 4)), Tensor("two", "int8", (5,))],
    ]
    with TensorWriter(REAL_DISK, tmp_path / "a", pieces) as writer:
        writer.write(1, [none, two])
        with pytest.raises(ValueError, match="1 pieces"):
            writer.finish()
        writer.write(0, [one, single])
        sums = writer.finish()
    check(tmp_path / "a", sums)
    found = load_file(tmp_path / "a")
    for name, expected in written.items():
        assert found[name].dtype == expected.dtype
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize("values", [[np.zeros(3, np.float64)], [np.zeros(4, np.float32)], []])
def test_other_values_than_announced_are_refused(tmp_path: Path, values: list[np.ndarray]) -> None:
    pieces = [[Tensor("a", "float32", (3,))]]
    sentence = "^a is float|is shorter than"
    with (
        TensorWriter(REAL_DISK, tmp_path / "a", pieces) as writer,
        pytest.raises(ValueError, match=sentence),
    ):
        writer.write(0, values)


@pytest.mark.parametrize("change", ["flip", "cut", "add"])
def test_every_change_of_a_file_is_found(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a"
    with TensorWriter(
        REAL_DISK, path, [[Tensor("a", "float32", (9,))], [Tensor("b", "int8", (3,))]]
    ) as file:
        file.write(0, [np.ones(9, np.float32)])
        file.write(1, [np.ones(3, np.int8)])
        sums = file.finish()
    data = path.read_bytes()
    for place in range(len(data)):
        if change == "flip":
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        else:
            path.write_bytes(data[:place] if change == "cut" else data + data[: place + 1])
        with pytest.raises(ValueError, match="checksum"):
            check(path, sums)


def test_a_snapshot_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    layout = small_layout()
    parameters = random_parameters(layout)
    state = new_state(parameters.spec, parameters.digests(), generation=0)
    fragments = Unwritten(parameters.fragments)
    fragment_bytes = 4 * layout.rows_padded * layout.block
    tracemalloc.start()
    try:
        snapshot.save(REAL_DISK, tmp_path, layout, Snapshot(state, fragments, {}))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(fragments) == 0
    assert peak_bytes < fragment_bytes / 2, "JSON and buffers, but no copy of any value"


def test_what_was_written_is_read_to_the_bit(tmp_path: Path) -> None:
    layout = small_layout()
    parameters = random_parameters(layout)
    other = random_parameters(layout, seed=1)
    mixed = tuple(
        FragmentParameters(
            a.master_BxN,
            b.broadcast_BxN,
            jax.tree.map(lambda _, value=a.master_BxN: value * jnp.float32(3), a.outer),
        )
        for a, b in zip(parameters.fragments, other.fragments, strict=True)
    )
    state = new_state(parameters.spec, other.digests(), generation=0)
    snapshot.save(REAL_DISK, tmp_path, layout, Snapshot(state, Unwritten(mixed), {}))
    restored = load_newest(tmp_path, parameters.spec, layout)
    assert restored.is_newest
    for found, expected in zip(restored.fragments, mixed, strict=True):
        np.testing.assert_array_equal(found.master_BxN, expected.master_BxN)
        np.testing.assert_array_equal(found.broadcast_BxN, expected.broadcast_BxN)
        (one,), (two,) = jax.tree.leaves(found.outer), jax.tree.leaves(expected.outer)
        np.testing.assert_array_equal(one, two)


def test_a_manifest_says_whether_it_is_what_was_written(tmp_path: Path) -> None:
    """Also where it still reads well: a position, a key or a digest of it is wrong."""
    spec = tiny_spec()
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    snapshots = tmp_path / "run" / "snapshots"
    path = snapshots / "000000" / "manifest.json"
    written = path.read_bytes()
    assert len(known(snapshots, spec)) == 1
    for place in range(0, len(written), 3):
        path.write_bytes(written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :])
        assert known(snapshots, spec) == [], f"with byte {place} altered"
        assert oldest_position(snapshots) is None


def test_a_snapshot_of_another_format_is_refused(tmp_path: Path) -> None:
    spec = tiny_spec()
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    path = tmp_path / "run" / "snapshots" / "000000" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(RunDirectoryError, match=r"format 2 is not 3: use the matching release"):
        load_newest(path.parents[1], *read_run(tmp_path / "run"))


def values(number: int) -> FragmentParameters:
    return FragmentParameters(jnp.full((1, 1), number), jnp.zeros((1, 1)), ())


def test_a_fragment_that_somebody_waits_for_is_written_next_and_all_are_let_go() -> None:
    kept = [values(number) for number in range(4)]
    alive = [weakref.ref(each.master_BxN) for each in kept]
    unwritten = Unwritten(kept)
    del kept
    order: list[int] = []

    def write(index: int, fragment: FragmentParameters) -> None:
        assert int(fragment.master_BxN[0, 0]) == index
        order.append(index)
        assert [number for number in range(4) if alive[number]() is None] == sorted(order[:-1])
        if index == 0:
            assert not unwritten.wait_written(3, 0.0)

    unwritten.write(write)
    assert order == [0, 3, 1, 2]
    assert [each() for each in alive] == [None] * 4


def test_who_waits_goes_on_once_it_is_written() -> None:
    unwritten = Unwritten([values(number) for number in range(3)])
    written: list[int] = []
    found: list[tuple[bool, bool]] = []
    waiter = threading.Thread(
        target=lambda: found.append((unwritten.wait_written(2, 20.0), 2 in written))
    )
    waiter.start()
    unwritten.write(lambda index, _: written.append(index))
    waiter.join()
    assert found == [(True, True)]


def test_nobody_waits_for_a_snapshot_that_failed() -> None:
    unwritten = Unwritten([values(0), values(1)])
    assert not unwritten.wait_written(1, 0.0)

    def broken(index: int, fragment: FragmentParameters) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="space"):
        unwritten.write(broken)
    assert unwritten.wait_written(1, 0.0)


def test_the_text_of_a_state_does_not_depend_on_the_process() -> None:
    """Where a set begins is chosen anew in each process, and a replay compares states."""
    names = [f"learner-{number}" for number in range(12)]
    program = {"factory": "a:b", "settings": {"since": date(2026, 1, 1)}}
    state = new_state(tiny_spec(program=program), ["", ""], generation=1)
    begun = Round(0, 0, 0.0, 0, tuple(names), frozenset(names), frozenset(names))
    first = replace(state.fragments[0], round=begun)
    state = replace(state, fragments=(first, *state.fragments[1:]))
    text = snapshot._state_json(state)
    written = json.loads(text)["fragments"][0]["round"]
    assert written["answered"] == written["declined"] == sorted(names)
    assert '"since": "2026-01-01"' in text
    assert snapshot._state_from_json(text, state.spec).fragments == state.fragments
