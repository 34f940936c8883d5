"""Compiled loops: no fused arithmetic, and they need no place to be kept in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fragments
from fragments.compiled import compiled
from fragments.memory import on_device
from fragments.slabs import empty


@compiled
def _multiply_add(x: np.float32, y: np.float32, z: np.float32) -> np.float32:
    return np.float32(np.float32(x * y) + z)


def test_product_and_sum_are_rounded_each() -> None:
    x = np.float32(1 + 2**-12)  # The square is 1 + 2^-11 + 2^-24; float32 drops the last.
    square = np.float32(1 + 2**-11)
    assert _multiply_add(x, x, -square) == 0.0


NO_PLACE = "import numba.core.caching as c; c.CacheImpl._locator_classes = []"
FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"


@pytest.mark.parametrize("trouble", [NO_PLACE, FULL_DISK])
def test_nothing_writable_is_needed(trouble: str, tmp_path: Path) -> None:
    """A read-only installation of a user without a home, or one on a full disk, compiles anew in
    each process.
    """
    code = (
        f"{trouble}\n"
        "import numpy as np\n"
        "from fragments.packing import pack\n"
        "print(pack(np.zeros((1, 5), np.int8)).trits.tolist())"
    )
    root = Path(fragments.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=root,
    )
    assert done.stdout.strip() == "[[121]]", done.stderr


def test_jax_takes_over_what_was_made_for_it() -> None:
    values = empty((3, 5), np.float32)
    values[:] = 1.5
    assert np.asarray(on_device(values)).ctypes.data == values.ctypes.data
