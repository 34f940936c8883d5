"""Between arrays of jax and this machine's memory, without a copy where none is needed."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections import defaultdict
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float32

from fragments.compiled import compiled

_Made = TypeVar("_Made")
_ALIGNMENT = 64
"""Bytes: an array that begins at such an address is taken over by jax without a copy."""

SLAB_BYTES = 1 << 20
"""From here on arrays have pages of their own, which another one of that size takes over: the
allocator would give them back, and the kernel would clear them again for the next.
"""

KEPT = 4
"""Slabs of a size that are kept for the next at most; all fragments have one size."""


def is_in_memory(values: Array | np.ndarray) -> bool:
    """Whether a loop can go over the values where they are."""
    return isinstance(values, np.ndarray) or values.platform() == "cpu"


def empty(shape: tuple[int, ...], dtype: np.dtype | type[np.generic]) -> np.ndarray:
    """An array without values yet, which `on_device` will not copy."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size >= SLAB_BYTES:
        # Arrays made of it hold the slab, and nothing else does.
        return np.asarray(_Slab(size)).view(kind).reshape(shape)
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


class _Slab:
    """Pages for one array; they are free for another once nothing made of it is left."""

    _free: ClassVar[defaultdict[int, list[mmap.mmap]]] = defaultdict(list)
    _lock = threading.RLock()  # The collector may end one slab while this thread makes another.
    _kept: ClassVar[int] = KEPT  # At the interpreter's end the module's names are gone before it.

    def __init__(self, size: int) -> None:
        with self._lock:
            kept = self._free[size]
            pages = kept.pop() if kept else None
        if pages is None:
            pages = mmap.mmap(-1, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
        self._size, self._pages = size, pages
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self.__array_interface__: dict[str, Any] = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip

    def __del__(self) -> None:
        with self._lock:
            if len(self._free[self._size]) < self._kept:
                self._free[self._size].append(self._pages)


def on_device(values: np.ndarray) -> Array:
    """`values` as a jax array on the default device. On a processor it is mostly the same memory,
    without a copy, so nobody may write to `values` while the array or a computation on it lives.
    """
    there: Array = jax.device_put(values, may_alias=True)
    return there


def computed(made: _Made) -> _Made:
    """What was dispatched to a device, once it is computed. From then on what it was computed of is
    not read any more, so that memory which `on_device` shared may go; no test can show that this is
    waited for, since a processor is seldom late.
    """
    ready: _Made = jax.block_until_ready(made)  # type: ignore[no-untyped-call]  # jax has no types for it
    return ready


@compiled
def subtract(
    one: Float32[np.ndarray, " values"],
    two: Float32[np.ndarray, " values"],
    made: Float32[np.ndarray, " values"],
) -> None:
    """made = one - two."""
    for i in range(len(made)):
        made[i] = one[i] - two[i]
