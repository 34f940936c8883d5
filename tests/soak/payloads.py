"""What may be in a hostile payload; its checksum fits whatever it is."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fragments.layout import FragmentLayout
from fragments.payload import CODECS, F32_CODEC, INT8_CODEC, Payload, encode_f32, encode_int8
from tests.soak import frames
from tests.soak.target import (
    LAYOUT,
    OTHER_LAYOUTS,
    UINT64_MAX,
    Target,
    Verdict,
    honest,
    payload_of,
    raw_of,
)

HEADER_BYTES = 20


def _raw(target: Target, rng: random.Random) -> bytearray:
    return raw_of(honest(target.codec, LAYOUT, target.layout, rng))


def _packed(target: Target, raw: bytes | bytearray, verdict: Verdict) -> tuple[Payload, Verdict]:
    return payload_of(target.codec, len(raw), frames.plain(bytes(raw))), verdict


def _other_values(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    """Bits flipped or bytes written over: it may well be another value."""
    raw = _raw(target, rng)
    for _ in range(rng.randrange(1, 9)):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return _packed(target, raw, Verdict.EITHER)


def _other_length(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    raw = _raw(target, rng)
    at, noise = rng.randrange(len(raw)), rng.randbytes(rng.randrange(1, 40))
    raw = raw[:at] if rng.random() < 0.5 else raw[:at] + noise + raw[at:]
    # A part of the escapes may be what was cut or doubled, and fit again.
    return _packed(target, raw, Verdict.EITHER)


def _other_header(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    raw = _raw(target, rng)
    at = rng.choice((0, 4, 8, 12))
    word = rng.choice((0, 1, 0xFFFFFFFF, rng.getrandbits(32)))
    before = raw[at : at + 4]
    raw[at : at + 4] = struct.pack("<I", word)
    verdict = Verdict.EITHER if raw[at : at + 4] == before else Verdict.REFUSED
    return _packed(target, raw, verdict)


def _step_bits(rng: random.Random) -> tuple[int, bool]:
    """bfloat16 bits of a step, and whether a quantizer makes such ones."""
    named = (0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 3e38, -1.0, 1e-45, 2.0**-101, 2.0**101)
    value = rng.choice((*named, 2.0**-100, 2.0**100, None))
    if value is None:
        bits = rng.getrandbits(16)
        value = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    bits = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    back = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return bits, bits == 0 or 2.0**-100 <= back <= 2.0**100


def _strange_scale(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    """A step, or a value where there are no steps, of 0, infinity, NaN, 1e30 and the like."""
    raw = _raw(target, rng)
    bits, is_sound = _step_bits(rng)
    if target.codec == INT8_CODEC:
        at = HEADER_BYTES + 2 * rng.randrange(target.layout.num_rows)
        raw[at : at + 2] = struct.pack("<H", bits)
        return _packed(target, raw, Verdict.EITHER if is_sound else Verdict.REFUSED)
    size = 4 if len(raw) == HEADER_BYTES + 4 * target.layout.num_values else 2
    at = HEADER_BYTES + size * rng.randrange(target.layout.num_values)
    raw[at : at + size] = struct.pack("<I", bits << 16)[4 - size :]
    is_finite = bits & 0x7F80 != 0x7F80
    return _packed(target, raw, Verdict.TAKEN if is_finite else Verdict.REFUSED)


def _strange_symbols(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    """Forms that do not exist, -128, bytes that are no trits: whatever follows the steps."""
    raw = _raw(target, rng)
    start = HEADER_BYTES + (2 * target.layout.num_rows if target.codec == INT8_CODEC else 0)
    for _ in range(rng.randrange(1, 5)):
        raw[rng.randrange(start, len(raw))] = rng.choice(
            (0x80, 0xFF, 243, 244, 3, rng.randrange(256))
        )
    return _packed(target, raw, Verdict.EITHER)


def _noise(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    """Of the right size, header and all, and the rest anything."""
    raw = _raw(target, rng)
    noise = rng.randbytes(len(raw) - HEADER_BYTES)
    return _packed(target, raw[:HEADER_BYTES] + noise, Verdict.EITHER)


def _damaged_frame(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    payload = honest(target.codec, LAYOUT, target.layout, rng)
    data, at = bytearray(payload.data), rng.randrange(len(payload.data))
    match rng.randrange(4):
        case 0:
            data = data[:at]
        case 1:
            data[at] ^= 1 << rng.randrange(8)
        case 2:
            data[at : at + 8] = rng.randbytes(len(data[at : at + 8]))
        case _:
            data += rng.randbytes(rng.randrange(1, 20))
    return payload_of(target.codec, payload.raw_size, bytes(data)), Verdict.EITHER


def _strange_frame(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    """Size missing, checksum, huge window, skippable, several: some are sound zstd all the same."""
    raw = bytes(_raw(target, rng))
    data = frames.strange(raw, rng)
    return payload_of(target.codec, len(raw), data), Verdict.EITHER


def _sizeless(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    raw = bytes(_raw(target, rng))
    data = frames.plain(raw, sized=False)
    return payload_of(target.codec, len(raw), data), Verdict.REFUSED


def _bomb(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    size = len(_raw(target, rng))
    data = frames.explosive(size, rng)
    declared = rng.choice((size, frames.BOMB_MIB[-1] << 20, UINT64_MAX))
    return payload_of(target.codec, declared, data), Verdict.REFUSED


def _other_shape(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    """Sound, of another layout or another fragment."""
    layout = rng.choice((*OTHER_LAYOUTS, LAYOUT))
    other = rng.choice(layout.fragments)
    # The header may say that it is for another fragment, which has that shape.
    is_known = any(_shape(other) == _shape(fragment) for fragment in LAYOUT.fragments)
    verdict = Verdict.EITHER if is_known else Verdict.REFUSED
    return honest(target.codec, layout, other, rng), verdict


def _shape(fragment: FragmentLayout) -> tuple[int, int, int]:
    return fragment.block, fragment.num_rows, fragment.num_values


def _other_dtype(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    """Sound in another codec, and under this one's name or its own."""
    other = rng.choice([codec for codec in CODECS if codec != target.codec])
    payload = honest(other, LAYOUT, target.layout, rng)
    named = rng.choice((target.codec, other))
    return replace(payload, codec=named), Verdict.REFUSED


def _nothing_or_one_value(target: Target, rng: random.Random) -> tuple[Payload, Verdict]:
    """All zero or constant, honestly encoded: ordinary."""
    shape = (LAYOUT.rows_padded, LAYOUT.block)
    fragment = target.layout
    if target.codec == INT8_CODEC:
        codes = np.full(shape, rng.choice((0, 1, -127, 127)), np.int8)
        steps = np.where(np.arange(shape[0]) < fragment.num_rows, 0x3F80, 0).astype(np.uint16)
        return encode_int8(fragment, codes, steps), Verdict.TAKEN
    value = rng.choice((0.0, -0.0, 1.0, 2.0**127, -(2.0**127), 2.0**-149))
    if target.codec != F32_CODEC:
        return honest(target.codec, LAYOUT, fragment, rng), Verdict.TAKEN
    return encode_f32(fragment, np.full(shape, value, np.float32)), Verdict.TAKEN


PAYLOADS: dict[str, Callable[[Target, random.Random], tuple[Payload, Verdict]]] = {
    "other values": _other_values,
    "other length": _other_length,
    "other header inside": _other_header,
    "strange scale": _strange_scale,
    "strange symbols": _strange_symbols,
    "noise": _noise,
    "damaged frame": _damaged_frame,
    "strange frame": _strange_frame,
    "no content size": _sizeless,
    "bomb": _bomb,
    "wrong shape": _other_shape,
    "wrong dtype": _other_dtype,
    "constant": _nothing_or_one_value,
}
