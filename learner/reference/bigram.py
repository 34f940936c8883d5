"""The bar that a model of text has to clear: a bigram model of the same training bytes."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8

ADD_K = 0.1
"""Pseudo-count of every pair; on 11 MB of text, .01 to 1 give the same loss within .003 bits."""


def bigram_bits_per_byte(
    train: UInt8[np.ndarray, " bytes"],
    windows: UInt8[np.ndarray, "windows window"],
    add_k: float = ADD_K,
) -> float:
    """Cross-entropy, in bits per byte, of each window's bytes given the one before each.

    p(b | a) = (n(a, b) + k) / (n(a) + 256 k), with n counted over `train` (add-k smoothing:
    Jurafsky and Martin, "Speech and Language Processing", 3rd ed., section 3.6). A window's first
    byte is context only, as for any other model evaluated on these windows.
    """
    pairs = train[:-1].astype(np.int64) * 256 + train[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + add_k
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    return float(bits[windows[:, :-1], windows[:, 1:]].mean())
