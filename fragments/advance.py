"""A fragment's broadcast copy one version on, and its digest, computed where the copy lives.

Shape letters: B rows (blocks), N values per row.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt16, UInt32

from fragments.compiled import compiled
from fragments.digest import digest_hex, digest_row, words_hex
from fragments.memory import is_in_memory, on_device
from fragments.quantize import (
    MAGNITUDE_MASK,
    SMALLEST_NORMAL_BITS,
    Symbols,
    apply_update,
    step_values_in_memory,
)
from fragments.slabs import empty


def advance(
    base_BxN: Float32[Array, "B N"],
    symbols_BxN: Symbols | np.ndarray,
    step_bits_B: UInt16[Array, " B"] | UInt16[np.ndarray, " B"],
) -> tuple[Float32[Array, "B N"], str]:
    """`apply_update` and the `digest_hex` of what comes out. Waits for the device."""
    if not is_in_memory(base_BxN):
        next_BxN = apply_update(base_BxN, jnp.asarray(symbols_BxN), jnp.asarray(step_bits_B))
        return next_BxN, digest_hex(next_BxN)
    made_BxN = empty(base_BxN.shape, np.float32)
    words = _advance(
        np.asarray(base_BxN),
        np.asarray(symbols_BxN),
        step_values_in_memory(np.asarray(step_bits_B)),
        made_BxN,
        made_BxN.view(np.uint32),
    )
    return on_device(made_BxN), words_hex(words)


@compiled
def _advance(
    base_BxN: Float32[np.ndarray, "B N"],
    symbols_BxN: np.ndarray,
    step_B: Float32[np.ndarray, " B"],
    made_BxN: Float32[np.ndarray, "B N"],
    made_bits_BxN: UInt32[np.ndarray, "B N"],
) -> tuple[np.uint32, np.uint32]:
    """One row after the other, which stays in the first cache. The last two arrays are the same
    memory. Product and sum have one rounding (see `fragments.quantize`), so these are the bits of
    `apply_update`.
    """
    linear = mixed = np.uint32(0)
    for i in range(len(made_BxN)):
        base_N, symbols_N, step = base_BxN[i], symbols_BxN[i], step_B[i]
        made_N, bits_N = made_BxN[i], made_bits_BxN[i]
        for j in range(len(made_N)):
            made_N[j] = base_N[j] + np.float32(symbols_N[j]) * step
        for j in range(len(bits_N)):
            is_tiny = np.uint32(bits_N[j] & MAGNITUDE_MASK) < SMALLEST_NORMAL_BITS
            bits_N[j] = np.uint32(0) if is_tiny else bits_N[j]
        row_linear, row_mixed = digest_row(bits_N, i)
        linear, mixed = np.uint32(linear + row_linear), np.uint32(mixed + row_mixed)
    return linear, mixed
