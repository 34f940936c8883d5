"""What a hostile sender knows of a run, and honest pushes to it to start from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise

import google_crc32c
import numpy as np
import zstandard

from diloco.v1 import common_pb2, push_pb2
from fragments.layout import FragmentLayout, Layout, TensorSpec, build_layout
from fragments.payload import (
    BF16_CODEC,
    INT8_CODEC,
    MAX_STEP_BITS,
    MIN_STEP_BITS,
    Payload,
    encode_bf16,
    encode_f32,
    encode_int8,
)
from fragments.records import Contribution, ContributionKey, Lease, Version
from services import translate

BLOCK = 64
UINT64_MAX = (1 << 64) - 1
TENSORS = (
    TensorSpec("bulk", (40, 64), "float32"),
    TensorSpec("wide", (1000,), "float32"),
    TensorSpec("flat", (130,), "float32"),
    TensorSpec("zero", (64,), "float32"),
    TensorSpec("empty", (0, 3), "float32"),
    TensorSpec("one", (), "float32", averaged=True),
)
LAYOUT = build_layout(TENSORS, 3, BLOCK, "soak")
OTHER_LAYOUTS = (
    build_layout(TENSORS, 2, BLOCK, "soak"),
    build_layout(TENSORS, 3, BLOCK // 2, "soak"),
    build_layout(TENSORS[:3], 3, BLOCK, "soak"),
    build_layout([TensorSpec("bulk", (2561,), "float32")], 1, BLOCK, "soak"),
    build_layout([TensorSpec("empty", (0,), "float32")], 1, BLOCK, "soak"),
)
_LAYOUTS = {layout.digest: layout for layout in (LAYOUT, *OTHER_LAYOUTS)}

_POOL = 64
"""Honest payloads of each kind."""


class Verdict(IntEnum):
    """Whether a push is to be taken. Of two tamperings the lower one holds."""

    REFUSED = 0
    EITHER = 1
    TAKEN = 2


@dataclass(frozen=True, slots=True)
class Target:
    """One run, and a base of a learner that no contribution has consumed yet."""

    run_id: str
    epoch: int
    codec: str
    lease: Lease
    fragment: int

    @property
    def layout(self) -> FragmentLayout:
        """That of the fragment."""
        return LAYOUT.fragments[self.fragment]


def honest(codec: str, layout: Layout, fragment: FragmentLayout, rng: random.Random) -> Payload:
    """What a learner could send: all kinds of symbols and steps, or nothing but zero or one value,
    with a zero, an empty and a one-element tensor wherever the layout has them.
    """
    return _honest(codec, layout.digest, fragment.index, rng.randrange(_POOL))


# Encoding costs more than all that is done to the bytes, and the bytes need not be new each time.
@lru_cache(maxsize=_POOL * 64)
def _honest(codec: str, layout_digest: str, index: int, which: int) -> Payload:
    layout = _LAYOUTS[layout_digest]
    fragment = layout.fragments[index]
    numbers = np.random.default_rng(which)
    shape = (layout.rows_padded, layout.block)
    valid_BxN = valid_of(layout, fragment)
    match which % 4:
        case 0:
            spread = numbers.choice([0.0, 0.4, 1.0, 4.0, 40.0], (shape[0], 1))
            values_BxN = np.clip(np.rint(spread * numbers.standard_normal(shape)), -127, 127)
        case 1:
            values_BxN = np.zeros(shape)
        case 2:
            values_BxN = np.full(shape, numbers.integers(-127, 128))
        case _:
            values_BxN = numbers.integers(-127, 128, shape)
    steps_B = _steps(shape[0], numbers)
    steps_B[fragment.num_rows :] = 0
    codes_BxN = np.where(valid_BxN & (steps_B > 0)[:, None], values_BxN, 0)
    if codec == INT8_CODEC:
        return encode_int8(fragment, codes_BxN.astype(np.int8), steps_B)
    encode = encode_bf16 if codec == BF16_CODEC else encode_f32
    return encode(fragment, codes_BxN.astype(np.float32))


def valid_of(layout: Layout, fragment: FragmentLayout) -> np.ndarray:
    """Where values lie, bool (rows_padded, block)."""
    mask = np.zeros(layout.rows_padded * layout.block, bool)
    for slot in fragment.slots:
        start = slot.row_start * layout.block
        mask[start : start + slot.size] = True
    return mask.reshape(layout.rows_padded, layout.block)


def _steps(rows: int, numbers: np.random.Generator) -> np.ndarray:
    steps_B = numbers.integers(MIN_STEP_BITS, MAX_STEP_BITS + 1, rows).astype(np.uint16)
    steps_B[numbers.random(rows) < 0.1] = 0
    steps_B[numbers.random(rows) < 0.05] = MAX_STEP_BITS
    return steps_B


def raw_of(payload: Payload) -> bytearray:
    """What was compressed."""
    return bytearray(zstandard.ZstdDecompressor().decompress(payload.data))


def payload_of(codec: str, raw_size: int, data: bytes) -> Payload:
    """A payload whose checksum fits."""
    return Payload(codec, raw_size, google_crc32c.value(data), data)


def header_of(target: Target, payload: Payload, rng: random.Random) -> push_pb2.PushHeader:
    """The header of an honest push."""
    version = Version(target.epoch, 0)
    key = ContributionKey(target.lease.learner, target.fragment, version)
    steps, cursor = rng.randrange(1, 100), rng.randrange(1000)
    contribution = Contribution(key, version, steps, 16 * steps, cursor, cursor + steps, payload)
    return translate.contribution_to_wire(
        contribution, target.lease, target.run_id, LAYOUT.digest, 0
    )


def first(header: push_pb2.PushHeader) -> bytes:
    """The first message of a push."""
    return push_pb2.PushRequest(header=header).SerializeToString()


def chunk(offset: int, data: bytes) -> bytes:
    """One of the others."""
    wire = common_pb2.Chunk(offset=offset, data=data)
    return push_pb2.PushRequest(chunk=wire).SerializeToString()


def cut(data: bytes, rng: random.Random, at_most: int = 6) -> list[tuple[int, bytes]]:
    """Offset and data of one to `at_most` chunks."""
    inside = range(1, len(data))
    ends = sorted(rng.sample(inside, min(len(inside), rng.randrange(at_most))))
    bounds = (0, *ends, len(data))
    return [(a, data[a:b]) for a, b in pairwise(bounds)]
