"""Arrays that jax takes over without a copy, and whose pages the next one takes over."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from fragments import slabs
from fragments.memory import on_device
from fragments.slabs import KEPT, SLAB_BYTES, empty

SHAPE = (SLAB_BYTES // 4096 + 3, 1024)
"""Of float32: a size that no other test has."""


def _address(values: np.ndarray) -> int:
    return int(values.ctypes.data)


def test_pages_go_to_the_next_array_once_nobody_holds_the_last() -> None:
    first = empty(SHAPE, np.float32)
    where, part = _address(first), first[5:7].reshape(-1)
    part[:] = 3.0
    del first
    gc.collect()
    other = empty(SHAPE, np.float32)
    assert _address(other) != where, "a part of the first is still held"
    assert (part == 3.0).all()
    del part
    gc.collect()
    assert _address(empty(SHAPE, np.float32)) == where


def test_what_jax_holds_is_nobody_elses() -> None:
    values = empty(SHAPE, np.float32)
    values[:] = 1.0
    where, there = _address(values), on_device(values)
    assert there.unsafe_buffer_pointer() == where, "no copy"
    del values
    gc.collect()
    twice = jax.jit(lambda x: x * 2)(there)
    others = [empty(SHAPE, np.float32) for _ in range(3)]
    for other in others:
        other[:] = 9.0
    assert where not in {_address(other) for other in others}
    assert float(there[0, 0]) == 1.0
    assert float(twice[-1, -1]) == 2.0
    del there
    twice.block_until_ready()
    gc.collect()
    assert _address(empty(SHAPE, np.float32)) == where


def test_slabs_are_private_which_large_pages_take() -> None:
    values = empty(SHAPE, np.float32)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux tells how memory is mapped")
    for line in maps.read_text("ascii").splitlines():
        place, rights = line.split()[:2]
        start, stop = (int(each, 16) for each in place.split("-"))
        if start <= _address(values) < stop:
            assert rights == "rw-p"
            return
    pytest.fail("the array is mapped nowhere")


def test_pages_serve_arrays_of_about_their_size() -> None:
    """Payloads of like fragments differ a little, and are not to have a heap of pages for each."""
    size = 9 * SLAB_BYTES
    first = empty((size,), np.uint8)
    where = _address(first)
    del first
    gc.collect()
    assert _address(empty((size - 1000,), np.uint8)) == where
    assert _address(empty((2 * size,), np.uint8)) != where


def test_few_pages_are_kept() -> None:
    shape = (3 * SHAPE[0], SHAPE[1])
    arrays = [empty(shape, np.float32) for _ in range(KEPT + 4)]
    places = {_address(each) for each in arrays}
    assert len(places) == KEPT + 4
    arrays.clear()
    gc.collect()
    again = [empty(shape, np.float32) for _ in range(KEPT)]
    assert {_address(each) for each in again} <= places


def test_arrays_that_outlive_the_module_end_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    left = [empty((SLAB_BYTES,), np.uint8) for _ in range(KEPT + 1)]
    # As the interpreter does at its end.
    for name in [name for name in vars(slabs) if not name.startswith("__")]:
        monkeypatch.setattr(slabs, name, None)
    left.clear()
    gc.collect()
    assert found == []
