"""A fragment as bytes for the wire and the disk: codec ids, zstd, checksum. Imports no jax.

What is compressed: a header (magic, block, rows, values), then

    int8-rms-zstd/2   the bfloat16 bits of each row's step, little-endian; a byte for each row's
                      form; the rows that are trits, nibbles and wide; the escapes of nibbles, then
                      those of trits (`fragments.packing`); padding is zero
    f32-zstd/1        the float32 values, little-endian, exact, of the tensors in the order of their
                      slots, padding left out
    bf16-zstd/1       likewise, the upper halves of values whose lower halves are zero

The zstd frame states its content size and carries no checksum; CRC-32C covers the frame. A decoder
knows from its layout, and only from there, how large each thing may be, and compares before it
decompresses: a declared size allocates nothing. Everything that does not fit raises PayloadError
with one sentence.

Shape letters: B rows (blocks), N values per row.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import google_crc32c
import numpy as np
import zstandard
from jaxtyping import Float32, Int8, UInt16

from fragments.errors import NonFiniteError, PayloadError
from fragments.layout import FragmentLayout
from fragments.packing import (
    ESCAPED_GROUP,
    GROUP,
    NIBBLES,
    TRITS,
    WIDE,
    Packed,
    pack,
    row_bytes,
    unpack,
)
from fragments.slabs import empty

INT8_CODEC = "int8-rms-zstd/2"
F32_CODEC = "f32-zstd/1"
BF16_CODEC = "bf16-zstd/1"
CODECS = (INT8_CODEC, F32_CODEC, BF16_CODEC)

MIN_STEP_BITS = (127 - 100) << 7
MAX_STEP_BITS = (127 + 100) << 7
"""Bits of the bfloat16 steps 2^-100 and 2^100; a step is 0 or lies between them, so that no product
of a step and a symbol is subnormal or infinite."""

DEFAULT_LEVEL = 1
"""Higher zstd levels search for matches that quantized noise does not have."""

_HEADER = struct.Struct("<4sIIQ")
_MAGIC = {INT8_CODEC: b"DLi2", F32_CODEC: b"DLf1", BF16_CODEC: b"DLb1"}
_VALUE_BYTES = {F32_CODEC: 4, BF16_CODEC: 2}


@dataclass(frozen=True, slots=True)
class Payload:
    """One encoded fragment.

    `raw_size`: bytes before compression. `crc32c`: of `data`, the zstd frame.
    """

    codec: str
    raw_size: int
    crc32c: int
    data: bytes

    @property
    def is_whole(self) -> bool:
        """Whether the bytes are those that the checksum was taken of."""
        return bool(google_crc32c.value(self.data) == self.crc32c)


def max_raw_size(codec: str, fragment: FragmentLayout) -> int:
    """The most bytes that this fragment may have in `codec` before compression; in f32 and bf16 it
    is what it always has. PayloadError for an unknown codec.
    """
    if codec == INT8_CODEC:
        return _HEADER.size + fragment.num_rows * (3 + fragment.block)
    if codec in _VALUE_BYTES:
        return _HEADER.size + _VALUE_BYTES[codec] * fragment.num_values
    raise PayloadError(f"codec {codec!r} is not known here; known are {', '.join(CODECS)}")


def max_wire_bytes(codec: str, fragment: FragmentLayout) -> int:
    """The most bytes that a payload of this fragment may have: the bound for an Assembler."""
    size = max_raw_size(codec, fragment)
    return size + size // 128 + 1024  # above ZSTD_compressBound, which is size + size/256 + ~64


def encode_int8(
    fragment: FragmentLayout,
    codes_BxN: Int8[np.ndarray, "B N"],
    step_bits_B: UInt16[np.ndarray, " B"],
    level: int = DEFAULT_LEVEL,
) -> Payload:
    """Encodes what `quantize` made. The same arrays give the same bytes.

    Raises PayloadError for arrays that do not fit the layout or that a decoder would refuse.
    """
    _check_blocks(fragment, codes_BxN, np.dtype(np.int8))
    if step_bits_B.dtype != np.uint16 or step_bits_B.shape != codes_BxN.shape[:1]:
        raise PayloadError(f"steps are {step_bits_B.dtype}{list(step_bits_B.shape)}, not one a row")
    rows = fragment.num_rows
    steps_B, codes_BxN = step_bits_B[:rows], _without_padding(fragment, codes_BxN[:rows])
    _check_int8(codes_BxN, steps_B)
    packed = pack(codes_BxN)
    parts = (
        np.frombuffer(_header(INT8_CODEC, fragment), np.uint8),
        steps_B.astype("<u2").view(np.uint8),
        packed.forms_B,
        packed.trits.reshape(-1),
        packed.nibbles.reshape(-1),
        packed.wide.reshape(-1).view(np.uint8),
        packed.nibble_escapes.view(np.uint8),
        packed.trit_escapes.reshape(-1).view(np.uint8),
    )
    body = empty((sum(part.size for part in parts),), np.uint8)
    return _compress(INT8_CODEC, np.concatenate(parts, out=body), level)


def decode_int8(
    fragment: FragmentLayout, rows_padded: int, payload: Payload
) -> tuple[Int8[np.ndarray, "B N"], UInt16[np.ndarray, " B"]]:
    """Codes int8 (rows_padded, block) and step bits uint16 (rows_padded,); padding is 0.

    Raises PayloadError for anything that `encode_int8` would not have made of this fragment.
    """
    body = _decompress(INT8_CODEC, fragment, payload)
    rows, width = fragment.num_rows, fragment.block
    step_bits_B = np.zeros(rows_padded, np.uint16)
    codes_BxN = empty((rows_padded, width), np.int8)
    codes_BxN[rows:] = 0
    step_bits_B[:rows] = _take(body, 0, 2 * rows).view("<u2")
    unpack(_packed(_take(body, 2 * rows, rows), width, body[3 * rows :]), codes_BxN[:rows])
    if any(tail.any() for tail in _tails(fragment, codes_BxN)):
        raise PayloadError("the payload has symbols in its padding")
    _check_int8(codes_BxN[:rows], step_bits_B[:rows])
    return codes_BxN, step_bits_B


def _packed(forms_B: np.ndarray, width: int, body: np.ndarray) -> Packed:
    """The packed rows and their escapes, as views of the rest of a payload's body."""
    if (forms_B > WIDE).any():
        raise PayloadError("the payload has a row of no known form")
    rows: list[np.ndarray] = []
    start = 0
    for form in (TRITS, NIBBLES, WIDE):
        count, size = int(np.count_nonzero(forms_B == form)), row_bytes(form, width)
        rows.append(_take(body, start, count * size).reshape(count, size))
        start += count * size
    escapes = body[start:].view(np.int8)
    groups = np.count_nonzero(rows[0] == ESCAPED_GROUP)
    if len(escapes) < GROUP * groups:
        raise PayloadError("the payload is shorter than its escapes")
    split = len(escapes) - GROUP * groups
    trit_escapes = escapes[split:].reshape(groups, GROUP)
    return Packed(forms_B, rows[0], trit_escapes, rows[1], rows[2].view(np.int8), escapes[:split])


def encode_f32(
    fragment: FragmentLayout,
    blocks_BxN: Float32[np.ndarray, "B N"],
    level: int = DEFAULT_LEVEL,
) -> Payload:
    """Encodes a fragment value exactly.

    Raises NonFiniteError for a NaN or infinity, PayloadError for an array that does not fit.
    """
    values = _values_of(fragment, blocks_BxN)
    return _compress(F32_CODEC, _with_header(F32_CODEC, fragment, values.astype("<f4")), level)


def decode_f32(
    fragment: FragmentLayout, rows_padded: int, payload: Payload
) -> Float32[np.ndarray, "B N"]:
    """The fragment value, float32 (rows_padded, block), to the bit; padding is +0.

    Raises PayloadError for anything that `encode_f32` would not have made of this fragment.
    """
    values = _decompress(F32_CODEC, fragment, payload).view("<f4")
    return _blocks_of(fragment, rows_padded, values)


def encode_bf16(
    fragment: FragmentLayout,
    blocks_BxN: Float32[np.ndarray, "B N"],
    level: int = DEFAULT_LEVEL,
) -> Payload:
    """Encodes values that are bfloat16 already, as float32 with zero lower halves.

    Raises NonFiniteError for a NaN or infinity, PayloadError for an array that does not fit or has
    other values.
    """
    bits = _values_of(fragment, blocks_BxN).view(np.uint32)
    if (bits & np.uint32(0xFFFF)).any():
        raise PayloadError("a value is no bfloat16")
    halves = (bits >> np.uint32(16)).astype("<u2")
    return _compress(BF16_CODEC, _with_header(BF16_CODEC, fragment, halves), level)


def decode_bf16(
    fragment: FragmentLayout, rows_padded: int, payload: Payload
) -> Float32[np.ndarray, "B N"]:
    """The values, float32 (rows_padded, block), with zero lower halves; padding is +0.

    Raises PayloadError for anything that `encode_bf16` would not have made of this fragment.
    """
    halves = _decompress(BF16_CODEC, fragment, payload).view("<u2")
    values = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _blocks_of(fragment, rows_padded, values)


def _values_of(
    fragment: FragmentLayout, blocks_BxN: Float32[np.ndarray, "B N"]
) -> Float32[np.ndarray, " values"]:
    """The values without padding, slot by slot."""
    _check_blocks(fragment, blocks_BxN, np.dtype(np.float32))
    values = np.empty(fragment.num_values, np.float32)
    _gather(fragment, blocks_BxN, values)
    if not np.isfinite(values).all():
        raise NonFiniteError(f"fragment {fragment.index} has values that are not finite")
    return values


def _blocks_of(
    fragment: FragmentLayout, rows_padded: int, values: Float32[np.ndarray, " values"]
) -> Float32[np.ndarray, "B N"]:
    """Undoes `_values_of`."""
    if not np.isfinite(values).all():
        raise PayloadError("the payload has values that are not finite")
    blocks_BxN = np.zeros((rows_padded, fragment.block), np.float32)
    _scatter(fragment, values, blocks_BxN)
    return blocks_BxN


def _with_header(codec: str, fragment: FragmentLayout, body: np.ndarray) -> np.ndarray:
    header = np.frombuffer(_header(codec, fragment), np.uint8)
    return np.concatenate((header, body.view(np.uint8)))


def _check_blocks(fragment: FragmentLayout, array: np.ndarray, dtype: np.dtype) -> None:
    fits = array.ndim == 2 and array.shape[0] >= fragment.num_rows
    if not fits or array.shape[1] != fragment.block or array.dtype != dtype:
        raise PayloadError(
            f"fragment {fragment.index} is {dtype}[>={fragment.num_rows}, {fragment.block}], but"
            f" {array.dtype}{list(array.shape)} was given"
        )


def _check_int8(codes_BxN: Int8[np.ndarray, "B N"], steps_B: UInt16[np.ndarray, " B"]) -> None:
    """Steps and symbols are those that a quantizer makes."""
    # A set sign bit, an infinity or a NaN are all above MAX_STEP_BITS as integers.
    zero_B = steps_B == 0
    if not (zero_B | ((steps_B >= MIN_STEP_BITS) & (steps_B <= MAX_STEP_BITS))).all():
        raise PayloadError("the payload has a step outside 2^-100 to 2^100")
    if codes_BxN.size and codes_BxN.min() == -128:
        raise PayloadError("the payload has the symbol -128, which no quantizer makes")
    if zero_B.any() and codes_BxN[zero_B].any():
        raise PayloadError("the payload has symbols in a block whose step is 0")


def _tails(fragment: FragmentLayout, codes_BxN: np.ndarray) -> Iterator[np.ndarray]:
    """The padding at the end of each tensor."""
    for slot in fragment.slots:
        yield codes_BxN[slot.row_start : slot.row_stop].reshape(-1)[slot.size :]


def _without_padding(
    fragment: FragmentLayout, codes_BxN: Int8[np.ndarray, "B N"]
) -> Int8[np.ndarray, "B N"]:
    """The symbols with zero in all padding: themselves where it is zero already."""
    if not any(tail.any() for tail in _tails(fragment, codes_BxN)):
        return codes_BxN
    clean_BxN = codes_BxN.copy()
    for tail in _tails(fragment, clean_BxN):
        tail[:] = 0
    return clean_BxN


def _take(body: np.ndarray, start: int, size: int) -> np.ndarray:
    part = body[start : start + size]
    if len(part) != size:
        raise PayloadError("the payload is shorter than its rows")
    return part


def _header(codec: str, fragment: FragmentLayout) -> bytes:
    return _HEADER.pack(_MAGIC[codec], fragment.block, fragment.num_rows, fragment.num_values)


def _gather(fragment: FragmentLayout, blocks_BxN: np.ndarray, out: np.ndarray) -> None:
    """Copies the valid values of each slot, one after the other, into the flat `out`."""
    start = 0
    for slot in fragment.slots:
        rows = blocks_BxN[slot.row_start : slot.row_stop].reshape(-1)
        out[start : start + slot.size] = rows[: slot.size]
        start += slot.size


def _scatter(fragment: FragmentLayout, values: np.ndarray, out_BxN: np.ndarray) -> None:
    """Undoes `_gather`; leaves padding as it is."""
    start = 0
    for slot in fragment.slots:
        rows = out_BxN[slot.row_start : slot.row_stop].reshape(-1)
        rows[: slot.size] = values[start : start + slot.size]
        start += slot.size


def _compress(codec: str, raw: np.ndarray, level: int) -> Payload:
    data = zstandard.ZstdCompressor(compression_params=_parameters(level)).compress(raw.data)
    return Payload(codec, raw.size, google_crc32c.value(data), data)


@lru_cache(maxsize=32)
def _parameters(level: int) -> zstandard.ZstdCompressionParameters:
    """Of a zstd level. Level 1 is tuned for symbols in which every match is a chance: few places
    are tried, and only long matches taken. That is faster, and up to a tenth smaller.
    """
    plain = {"write_content_size": True, "write_checksum": False, "write_dict_id": False}
    if level != 1:
        return zstandard.ZstdCompressionParameters.from_level(level, **plain)
    return zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=19, **plain
    )


def _decompress(codec: str, fragment: FragmentLayout, payload: Payload) -> np.ndarray:
    """The body as uint8, after every check that needs no decompression, then the header's."""
    data = payload.data
    if google_crc32c.value(data) != payload.crc32c:
        raise PayloadError("the payload's checksum does not match: it was damaged on its way")
    if payload.codec != codec:
        raise PayloadError(f"the payload's codec is {payload.codec!r}; expected {codec!r}")
    most = max_raw_size(codec, fragment)
    expected = payload.raw_size
    if not _HEADER.size <= expected <= most or (codec in _VALUE_BYTES and expected != most):
        raise PayloadError(f"the payload declares {expected} raw bytes; {most} are its bound")
    if len(data) > max_wire_bytes(codec, fragment):
        raise PayloadError(f"{len(data)} bytes are too many for a fragment of {most} raw bytes")
    try:
        content_size = zstandard.get_frame_parameters(data).content_size
        if content_size != expected:
            raise PayloadError(f"the zstd frame states {content_size} bytes, not {expected}")
        raw = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadError(f"the payload is not a whole zstd frame: {error}") from error
    if len(raw) != expected or raw[: _HEADER.size] != _header(codec, fragment):
        raise PayloadError("the payload was encoded for another layout")
    return np.frombuffer(raw, np.uint8, offset=_HEADER.size)
