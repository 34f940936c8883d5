"""Which training window comes when: a fresh pseudo-random order for every pass, without state.

The train bytes are cut into windows of `seq_len` + 1 bytes that overlap by one, so that every byte
but the first is a target exactly once in a pass. A keyed permutation orders the windows; shard s of
S takes positions s, s + S, s + 2S, … of that order. A batch is therefore a pure function of
(seed, shard, cursor): nothing to checkpoint but the cursor, O(1) memory, and shards that are
disjoint within a pass by construction. (Contiguous shards are permuted each within itself.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt8, UInt64

from fragments.errors import DataError
from learner.program import Shard

_ROUNDS = 4

UInts = UInt64[np.ndarray, " size"]


@dataclass(frozen=True, eq=False)
class Windows:
    """`text` (u8[bytes]) as windows of `seq_len` + 1 bytes in an order keyed by `seed`.

    Raises:
        DataError: when the text does not fill a single window.
    """

    text: UInt8[np.ndarray, " bytes"]
    seq_len: int
    seed: int
    contiguous: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise DataError(
                f"the text is too small: {len(self.text)} bytes do not fill one window of "
                f"{self.seq_len + 1}"
            )

    @property
    def count(self) -> int:
        """Windows in one pass."""
        return (len(self.text) - 1) // self.seq_len

    def indices(self, shard: Shard, start: int, size: int) -> Int64[np.ndarray, " size"]:
        """Window numbers (0..count-1) that `shard` trains on as its `start`-th to (+`size`)-th.

        Crosses from one pass into the next as often as needed.

        Raises:
            DataError: when there are more shards than windows.
            ValueError: for a negative `start`.
        """
        if start < 0:
            raise ValueError(f"start must not be negative, got {start}")
        if shard.count > self.count:
            raise DataError(
                f"the text is too small for {shard.count} learners: it has {self.count} windows "
                f"of {self.seq_len + 1} bytes"
            )
        if self.contiguous:
            return self._from_stretch(shard, start, size)
        windows_in_shard = len(range(shard.index, self.count, shard.count))
        ordinals = np.arange(start, start + size, dtype=np.int64)
        passes, within = np.divmod(ordinals, windows_in_shard)
        positions = shard.index + shard.count * within
        return _permuted(positions, passes, self.count, self.seed)

    def _from_stretch(self, shard: Shard, start: int, size: int) -> Int64[np.ndarray, " size"]:
        """As `indices`, where shard s of S is the s-th of S equal stretches of the text."""
        first = shard.index * self.count // shard.count
        stop = (shard.index + 1) * self.count // shard.count
        ordinals = np.arange(start, start + size, dtype=np.int64)
        passes, within = np.divmod(ordinals, stop - first)
        return first + _permuted(within, passes, stop - first, self.seed)

    def take(self, indices: Int64[np.ndarray, " size"]) -> UInt8[np.ndarray, "size window"]:
        """The bytes of those windows, copied: u8[size, seq_len + 1]."""
        offsets = np.arange(self.seq_len + 1, dtype=np.int64)
        return self.text[indices[:, None] * self.seq_len + offsets]


def _permuted(
    positions: Int64[np.ndarray, " size"],
    passes: Int64[np.ndarray, " size"],
    count: int,
    seed: int,
) -> Int64[np.ndarray, " size"]:
    """Each position's image in the order of its own pass."""
    chosen = np.empty(len(positions), dtype=np.int64)
    for pass_index in np.unique(passes):
        here = passes == pass_index
        chosen[here] = permute(positions[here], count, (seed, int(pass_index)))
    return chosen


def permute(
    positions: Int64[np.ndarray, " size"], count: int, key: tuple[int, int]
) -> Int64[np.ndarray, " size"]:
    """The images of `positions` (each in 0..count-1) under a permutation of 0..count-1 by `key`.

    A balanced Feistel network on the smallest even number of bits that holds `count`, walked until
    the value falls inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002). The domain is under 4 times `count`, so a walk takes few steps. Not a cipher:
    four rounds mix well enough for an order of training windows.
    """
    half_bits = max(1, (int(count - 1).bit_length() + 1) // 2)
    round_keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
    values = _feistel(positions.astype(np.uint64), half_bits, round_keys)
    outside = values >= np.uint64(count)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, round_keys)
        outside = values >= np.uint64(count)
    return values.astype(np.int64)


def _feistel(values: UInts, half_bits: int, round_keys: UInt64[np.ndarray, " rounds"]) -> UInts:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << shift) | right


def _mix(values: UInts) -> UInts:
    """The finalizer of splitmix64 (Steele, Lea, Flood, "Fast Splittable PRNGs", 2014); u64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInts = values ^ (values >> np.uint64(31))
    return mixed
