"""What may be wrong with the header of a push, and with its messages on the wire."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.v1 import push_pb2
from tests.soak.target import UINT64_MAX, Verdict, chunk, first


@dataclass(slots=True)
class Draft:
    """A push in the making. `lead`: a call before it, that breaks off."""

    rng: random.Random
    header: push_pb2.PushHeader
    chunks: list[tuple[int, bytes]]
    messages: list[bytes] = field(default_factory=list)
    lead: list[bytes] = field(default_factory=list)


_Tamper = Callable[[Draft], Verdict]


# The header.


def _odd_number(rng: random.Random, here: int) -> int:
    odd = (0, 1, here - 1, here + 1, 1 << 31, 1 << 32, 1 << 63, UINT64_MAX, rng.getrandbits(16))
    return rng.choice(odd) % (UINT64_MAX + 1)


def _odd_text(rng: random.Random, here: str) -> str:
    odd = ("", here[:-1], here + "x", here.upper(), "\0", "é" * 300, "x" * 20_000, "../../etc")
    return rng.choice(odd)


def _wrong_text(part: Callable[[push_pb2.PushHeader], object], name: str) -> _Tamper:
    def tamper(draft: Draft) -> Verdict:
        message = part(draft.header)
        before = getattr(message, name)
        setattr(message, name, after := _odd_text(draft.rng, before))
        return Verdict.TAKEN if after == before else Verdict.REFUSED

    return tamper


def _wrong_size(draft: Draft) -> Verdict:
    payload = draft.header.payload
    name = draft.rng.choice(("wire_bytes", "raw_bytes"))
    before = getattr(payload, name)
    setattr(payload, name, after := _odd_number(draft.rng, before))
    return Verdict.TAKEN if after == before else Verdict.REFUSED


def _wrong_checksum(draft: Draft) -> Verdict:
    payload = draft.header.payload
    payload.crc32c ^= 1 << draft.rng.randrange(32)
    return Verdict.REFUSED


def _wrong_offset(draft: Draft) -> Verdict:
    draft.header.offset = draft.rng.choice((1, 7, draft.header.payload.wire_bytes + 1, UINT64_MAX))
    return Verdict.REFUSED


def _wrong_counts(draft: Draft) -> Verdict:
    """Steps, tokens and cursors that make no sense, or just enough of it."""
    name = draft.rng.choice(("steps", "tokens", "cursor_from", "cursor_to"))
    setattr(draft.header, name, _odd_number(draft.rng, getattr(draft.header, name)))
    return Verdict.EITHER


def _wrong_version(draft: Draft) -> Verdict:
    """Of the base or of the ask. Nothing but the present epoch and its version 0 is there."""
    of_base = draft.rng.random() < 0.5
    version = draft.header.key.base_version if of_base else draft.header.asked_version
    name = draft.rng.choice(("epoch", "number"))
    before = getattr(version, name)
    setattr(version, name, after := _odd_number(draft.rng, before))
    return Verdict.REFUSED if of_base and after != before else Verdict.TAKEN


def _wrong_fragment(draft: Draft) -> Verdict:
    before = draft.header.key.fragment
    draft.header.key.fragment = _odd_number(draft.rng, before) % (1 << 32)
    # What is in the payload may have been made for that one.
    return Verdict.TAKEN if draft.header.key.fragment == before else Verdict.EITHER


def _wrong_token(draft: Draft) -> Verdict:
    lease = draft.header.lease
    before = lease.token
    lease.token = _odd_number(draft.rng, before)
    return Verdict.TAKEN if lease.token == before else Verdict.REFUSED


def _missing_part(draft: Draft) -> Verdict:
    draft.header.ClearField(draft.rng.choice(("lease", "key", "payload")))
    return Verdict.REFUSED


HEADERS: dict[str, _Tamper] = {
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


def _truncated(draft: Draft) -> Verdict:
    """The stream ends early, between two messages or within a chunk."""
    keep = draft.rng.randrange(len(draft.messages))
    last = draft.chunks[keep - 2] if keep > 1 else (0, b"")
    draft.messages = draft.messages[:keep]
    if len(last[1]) > 1 and draft.rng.random() < 0.5:
        draft.messages[-1] = chunk(last[0], last[1][: draft.rng.randrange(1, len(last[1]))])
    return Verdict.REFUSED


def _repeated(draft: Draft) -> Verdict:
    at = draft.rng.randrange(len(draft.messages))
    draft.messages.insert(draft.rng.randrange(at, len(draft.messages)) + 1, draft.messages[at])
    return Verdict.REFUSED


def _reordered(draft: Draft) -> Verdict:
    before = list(draft.messages)
    draft.rng.shuffle(draft.messages)
    return Verdict.TAKEN if draft.messages == before else Verdict.REFUSED


def _dropped(draft: Draft) -> Verdict:
    del draft.messages[draft.rng.randrange(len(draft.messages))]
    return Verdict.REFUSED


def _flipped(draft: Draft) -> Verdict:
    """Bits of chunk data, which the checksum sees."""
    at = draft.rng.randrange(len(draft.chunks))
    offset, data = draft.chunks[at][0], bytearray(draft.chunks[at][1])
    for place in draft.rng.sample(range(len(data)), min(len(data), draft.rng.randrange(1, 4))):
        data[place] ^= 1 << draft.rng.randrange(8)
    draft.messages[1 + at] = chunk(offset, bytes(data))
    return Verdict.REFUSED


def _moved(draft: Draft) -> Verdict:
    """A chunk that says it belongs elsewhere."""
    at = draft.rng.randrange(len(draft.chunks))
    offset, data = draft.chunks[at]
    elsewhere = _odd_number(draft.rng, offset)
    draft.messages[1 + at] = chunk(elsewhere, data)
    return Verdict.TAKEN if elsewhere == offset else Verdict.REFUSED


def _surplus(draft: Draft) -> Verdict:
    """More than was declared, nothing in a chunk, nothing in a message."""
    end = sum(len(data) for _, data in draft.chunks)
    extra = draft.rng.choice((chunk(end, b"\0"), chunk(end, bytes(1 << 16)), chunk(0, b""), b""))
    draft.messages.insert(draft.rng.randrange(1, len(draft.messages) + 1), extra)
    return Verdict.REFUSED


def _unreadable(draft: Draft) -> Verdict:
    """No message of the contract at all."""
    at = draft.rng.randrange(len(draft.messages))
    draft.messages[at] = b"\x0a\xff" + draft.rng.randbytes(draft.rng.randrange(1, 100))
    return Verdict.REFUSED


_TOO_LARGE = chunk(0, bytes(5 << 20))


def _too_large(draft: Draft) -> Verdict:
    """A message above what the server receives at all."""
    draft.messages[1] = _TOO_LARGE
    return Verdict.REFUSED


def _resumed(draft: Draft) -> Verdict:
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


MESSAGES: dict[str, _Tamper] = {
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
