"""Memory for large arrays, which those that come after them take over.

A page that the kernel hands out is cleared first: on a virtual machine 0.55 s for a GB of small
pages and 0.16 s of large ones, where a copy takes 0.1 s.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections import defaultdict
from typing import Any, ClassVar

import numpy as np

_ALIGNMENT = 64
"""Bytes: an array that begins at such an address is taken over by jax without a copy."""

SLAB_BYTES = 1 << 20
"""From here on arrays have pages of their own, which another one of about that size takes over: the
allocator would give them back, and the kernel would clear them again for the next.
"""

KEPT = 4
"""Slabs of a size that are kept for the next at most: a merge takes as many."""

_LARGE_PAGE = 2 << 20
"""The kernel aligns what is a multiple of them, so that they serve it."""

_STEPS = 8
"""Sizes from one power of two to the next: payloads of like fragments are of nearly one size."""


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


def _rounded(size: int) -> int:
    """Up to the next of those that slabs have."""
    step = 1 << max(0, size.bit_length() - _STEPS.bit_length())
    return -(-size // step) * step


class _Slab:
    """Pages for one array; they are free for another once nothing made of it is left."""

    _free: ClassVar[defaultdict[int, list[mmap.mmap]]] = defaultdict(list)
    _lock = threading.RLock()  # The collector may end one slab while this thread makes another.
    _kept: ClassVar[int] = KEPT  # At the interpreter's end the module's names are gone before it.

    def __init__(self, size: int) -> None:
        whole = _rounded(size)
        with self._lock:
            kept = self._free[whole]
            pages = kept.pop() if kept else None
        if pages is None:
            # Private, or they would be a file's to the kernel, which has small pages.
            pages = mmap.mmap(
                -1,
                -(-whole // _LARGE_PAGE) * _LARGE_PAGE,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            )
            large = whole // _LARGE_PAGE * _LARGE_PAGE
            # Not the rest, of which a large page would take more memory than there is to hold.
            if large and hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE, 0, large)
        self._size, self._pages = whole, pages
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self.__array_interface__: dict[str, Any] = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip

    def __del__(self) -> None:
        with self._lock:
            if len(self._free[self._size]) < self._kept:
                self._free[self._size].append(self._pages)
