"""Hostile pushes, one a number: the same seed, number and target give the same bytes.

Three stages may be tampered with: what is in the payload (its checksum made to fit), what the header
says, and the messages on the wire. A case tampers with one of them, sometimes with two.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from diloco.v1 import push_pb2
from fragments.payload import CODECS, INT8_CODEC, Payload, encode_f32, encode_int8
from tests.soak import frames
from tests.soak.target import (
    LAYOUT,
    OTHER_LAYOUTS,
    Target,
    chunk,
    cut,
    first,
    header_of,
    honest,
    payload_of,
    raw_of,
)

HEADER_BYTES = 20
UINT64_MAX = (1 << 64) - 1


class Verdict(IntEnum):
    """Whether a push is to be taken. Of two tamperings the lower one holds."""

    REFUSED = 0
    EITHER = 1
    TAKEN = 2


@dataclass(frozen=True, slots=True)
class Call:
    """One call of Push: its serialized messages."""

    messages: tuple[bytes, ...]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Case:
    """What is sent, and the names of what was done to it."""

    number: int
    kind: str
    calls: tuple[Call, ...]


@dataclass(slots=True)
class _Draft:
    """A push in the making. `lead`: a call before it, that breaks off."""

    target: Target
    rng: random.Random
    header: push_pb2.PushHeader
    chunks: list[tuple[int, bytes]]
    messages: list[bytes] = field(default_factory=list)
    lead: list[bytes] = field(default_factory=list)


_Values = Callable[[Target, random.Random], tuple[Payload, Verdict]]
_Tamper = Callable[[_Draft], Verdict]


def case(seed: int, number: int, target: Target) -> Case:
    """The case of that number."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311  (not for secrets)
    stages = [rng.choice(("values", "header", "wire"))]
    if rng.random() < 0.2:
        stages.append(rng.choice(("values", "header", "wire")))
    if rng.random() < 0.02:
        stages = []
    names, verdict = [], Verdict.TAKEN
    payload = honest(target.codec, LAYOUT, target.layout, rng)
    if "values" in stages:
        name = rng.choice(list(_VALUES))
        payload, verdict = _VALUES[name](target, rng)
        names.append(name)
    draft = _Draft(target, rng, header_of(target, payload, rng), cut(payload.data or b"\0", rng))
    if "header" in stages:
        name = rng.choice(list(_HEADER))
        verdict = min(verdict, _HEADER[name](draft))
        names.append(name)
    draft.messages = [first(draft.header), *(chunk(*piece) for piece in draft.chunks)]
    lead = Verdict.REFUSED
    if "wire" in stages:
        name = rng.choice(list(_WIRE))
        verdict = min(verdict, _WIRE[name](draft))
        names.append(name)
    calls = [Call(tuple(draft.lead), lead)] if draft.lead else []
    calls.append(Call(tuple(draft.messages), verdict))
    return Case(number, " + ".join(names) or "honest", tuple(calls))


# What is in the payload.


def _raw(target: Target, rng: random.Random) -> bytearray:
    return raw_of(honest(target.codec, LAYOUT, target.layout, rng))


def _packed(target: Target, raw: bytes, verdict: Verdict) -> tuple[Payload, Verdict]:
    return payload_of(target.codec, len(raw), frames.plain(raw)), verdict


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
        raw[rng.randrange(start, len(raw))] = rng.choice((0x80, 0xFF, 243, 244, 3, rng.randrange(256)))
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
    payload = honest(target.codec, layout, other, rng)
    here = target.layout
    same = (other.block, other.num_rows, other.num_values) == (
        here.block,
        here.num_rows,
        here.num_values,
    )
    return payload, Verdict.EITHER if same else Verdict.REFUSED


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
    if target.codec != "f32-zstd/1":
        return honest(target.codec, LAYOUT, fragment, rng), Verdict.TAKEN
    return encode_f32(fragment, np.full(shape, value, np.float32)), Verdict.TAKEN


_VALUES: dict[str, _Values] = {
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


# What the header says.


def _odd_number(rng: random.Random, here: int) -> int:
    odd = (0, 1, here - 1, here + 1, 1 << 31, 1 << 32, 1 << 63, UINT64_MAX, rng.getrandbits(16))
    return rng.choice(odd) % (UINT64_MAX + 1)


def _odd_text(rng: random.Random, here: str) -> str:
    odd = ("", here[:-1], here + "x", here.upper(), "\0", "é" * 300, "x" * 20_000, "../../etc")
    return rng.choice(odd)


def _wrong_text(part: Callable[[push_pb2.PushHeader], object], name: str) -> _Tamper:
    def tamper(draft: _Draft) -> Verdict:
        message = part(draft.header)
        before = getattr(message, name)
        setattr(message, name, after := _odd_text(draft.rng, before))
        return Verdict.TAKEN if after == before else Verdict.REFUSED

    return tamper


def _wrong_size(draft: _Draft) -> Verdict:
    payload = draft.header.payload
    name = draft.rng.choice(("wire_bytes", "raw_bytes"))
    before = getattr(payload, name)
    setattr(payload, name, after := _odd_number(draft.rng, before))
    return Verdict.TAKEN if after == before else Verdict.REFUSED


def _wrong_checksum(draft: _Draft) -> Verdict:
    payload = draft.header.payload
    payload.crc32c ^= 1 << draft.rng.randrange(32)
    return Verdict.REFUSED


def _wrong_offset(draft: _Draft) -> Verdict:
    draft.header.offset = draft.rng.choice((1, 7, draft.header.payload.wire_bytes, UINT64_MAX))
    return Verdict.REFUSED


def _wrong_counts(draft: _Draft) -> Verdict:
    """Steps, tokens and cursors that make no sense, or just enough of it."""
    name = draft.rng.choice(("steps", "tokens", "cursor_from", "cursor_to"))
    setattr(draft.header, name, _odd_number(draft.rng, getattr(draft.header, name)))
    return Verdict.EITHER


def _wrong_version(draft: _Draft) -> Verdict:
    """Of the base or of the ask. Nothing but the present epoch and its version 0 is there."""
    of_base = draft.rng.random() < 0.5
    version = draft.header.key.base_version if of_base else draft.header.asked_version
    name = draft.rng.choice(("epoch", "number"))
    before = getattr(version, name)
    setattr(version, name, after := _odd_number(draft.rng, before))
    return Verdict.REFUSED if of_base and after != before else Verdict.TAKEN


def _wrong_fragment(draft: _Draft) -> Verdict:
    before = draft.header.key.fragment
    draft.header.key.fragment = _odd_number(draft.rng, before) % (1 << 32)
    return Verdict.TAKEN if draft.header.key.fragment == before else Verdict.REFUSED


def _wrong_token(draft: _Draft) -> Verdict:
    lease = draft.header.lease
    before = lease.token
    lease.token = _odd_number(draft.rng, before)
    return Verdict.TAKEN if lease.token == before else Verdict.REFUSED


def _missing_part(draft: _Draft) -> Verdict:
    draft.header.ClearField(draft.rng.choice(("lease", "key", "payload")))
    return Verdict.REFUSED


_HEADER: dict[str, _Tamper] = {
    "wrong run": _wrong_text(lambda header: header.key, "run_id"),
    "wrong layout": _wrong_text(lambda header: header, "layout_digest"),
    "wrong codec": _wrong_text(lambda header: header.payload, "codec"),
    "wrong name": _wrong_text(lambda header: header.lease, "learner"),
    "wrong size": _wrong_size,
    "wrong checksum": _wrong_checksum,
    "wrong offset": _wrong_offset,
    "wrong counts": _wrong_counts,
    "wrong version": _wrong_version,
    "wrong fragment": _wrong_fragment,
    "wrong token": _wrong_token,
    "missing part": _missing_part,
}


# The messages.


def _truncated(draft: _Draft) -> Verdict:
    """The stream ends early, between two messages or within a chunk."""
    keep = draft.rng.randrange(len(draft.messages))
    last = draft.chunks[keep - 2] if keep > 1 else (0, b"")
    draft.messages = draft.messages[:keep]
    if len(last[1]) > 1 and draft.rng.random() < 0.5:
        draft.messages[-1] = chunk(last[0], last[1][: draft.rng.randrange(1, len(last[1]))])
    return Verdict.REFUSED


def _repeated(draft: _Draft) -> Verdict:
    at = draft.rng.randrange(len(draft.messages))
    draft.messages.insert(draft.rng.randrange(at, len(draft.messages)) + 1, draft.messages[at])
    return Verdict.REFUSED


def _reordered(draft: _Draft) -> Verdict:
    before = list(draft.messages)
    draft.rng.shuffle(draft.messages)
    return Verdict.TAKEN if draft.messages == before else Verdict.REFUSED


def _dropped(draft: _Draft) -> Verdict:
    del draft.messages[draft.rng.randrange(len(draft.messages))]
    return Verdict.REFUSED


def _flipped(draft: _Draft) -> Verdict:
    """Bits of chunk data, which the checksum sees."""
    at = draft.rng.randrange(len(draft.chunks))
    offset, data = draft.chunks[at][0], bytearray(draft.chunks[at][1])
    for place in draft.rng.sample(range(len(data)), min(len(data), draft.rng.randrange(1, 4))):
        data[place] ^= 1 << draft.rng.randrange(8)
    draft.messages[1 + at] = chunk(offset, bytes(data))
    return Verdict.REFUSED


def _moved(draft: _Draft) -> Verdict:
    """A chunk that says it belongs elsewhere."""
    at = draft.rng.randrange(len(draft.chunks))
    offset, data = draft.chunks[at]
    elsewhere = _odd_number(draft.rng, offset)
    draft.messages[1 + at] = chunk(elsewhere, data)
    return Verdict.TAKEN if elsewhere == offset else Verdict.REFUSED


def _surplus(draft: _Draft) -> Verdict:
    """More than was declared, nothing in a chunk, nothing in a message."""
    end = sum(len(data) for _, data in draft.chunks)
    extra = draft.rng.choice((chunk(end, b"\0"), chunk(end, bytes(1 << 16)), chunk(0, b""), b""))
    draft.messages.insert(draft.rng.randrange(1, len(draft.messages) + 1), extra)
    return Verdict.REFUSED


def _unreadable(draft: _Draft) -> Verdict:
    """No message of the contract at all."""
    at = draft.rng.randrange(len(draft.messages))
    draft.messages[at] = b"\x0a\xff" + draft.rng.randbytes(draft.rng.randrange(1, 100))
    return Verdict.REFUSED


def _too_large(draft: _Draft) -> Verdict:
    """A message above what the server receives at all."""
    draft.messages[1] = chunk(0, bytes(5 << 20))
    return Verdict.REFUSED


def _resumed(draft: _Draft) -> Verdict:
    """A call breaks off, and the next one goes on: rightly, elsewhere, or with other bytes."""
    if len(draft.chunks) < 2:
        return Verdict.TAKEN
    keep = draft.rng.randrange(1, len(draft.chunks))
    draft.lead = draft.messages[: 1 + keep]
    rest = draft.chunks[keep:]
    verdict, offset = Verdict.TAKEN, rest[0][0]
    match draft.rng.randrange(3):
        case 0:
            data = bytes(byte ^ 0xFF for byte in rest[-1][1])
            rest[-1] = (rest[-1][0], data)
            verdict = Verdict.REFUSED
        case 1:
            offset += draft.rng.choice((-1, 1))
            verdict = Verdict.REFUSED
    draft.header.offset = offset
    draft.messages = [first(draft.header), *(chunk(*piece) for piece in rest)]
    return verdict


_WIRE: dict[str, _Tamper] = {
    "truncated": _truncated,
    "repeated": _repeated,
    "reordered": _reordered,
    "dropped": _dropped,
    "bit-flipped": _flipped,
    "moved": _moved,
    "surplus": _surplus,
    "unreadable": _unreadable,
    "too large": _too_large,
    "resumed": _resumed,
}

KINDS: Sequence[str] = ("honest", *_VALUES, *_HEADER, *_WIRE)
"""Every single thing that is done."""
