"""Loops over arrays in this machine's memory, compiled.

The codec and the outer server go through every value of the model many times in a run; a chain of
array operations would go through memory once for each of its links, a loop does so once. Compiled
without leave to reorder or to fuse floating-point operations, so that the same loop gives the same
bits on every processor.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def compiled(loop: _Loop) -> _Loop:
    """`loop`, compiled at its first call for the types of its arguments; it holds no interpreter
    lock. What is compiled is kept on disk for the next process, where a place can be written to.
    """
    plain = inspect.unwrap(loop)  # Checks of argument types, where tests put them, do not compile.
    try:
        made = _jit(plain, is_kept=True)
    except RuntimeError:  # No place to keep it.
        made = _jit(plain, is_kept=False)
    return cast(_Loop, made)


def _jit(loop: Callable[..., Any], *, is_kept: bool) -> Callable[..., Any]:
    made: Any = numba.njit(loop, cache=is_kept, nogil=True, error_model="numpy")
    if is_kept:
        # The first call keeps what it has compiled: a full disk must not fail it.
        keep = made._cache.save_overload

        def keep_if_possible(signature: Any, compiled_loop: Any) -> None:
            with contextlib.suppress(OSError):
                keep(signature, compiled_loop)

        made._cache.save_overload = keep_if_possible
    kept: Callable[..., Any] = made
    return kept
