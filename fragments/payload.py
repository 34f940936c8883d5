"""A fragment as bytes for the wire and the disk: codec ids, zstd, checksum. Imports no jax.

What is compressed: a header (magic, block, rows, values), then

    int8-rms-zstd/1   the bfloat16 bits of each row's step, little-endian, then the int8 codes
    f32-zstd/1        the float32 values, little-endian, exact

of the tensors in the order of their slots, padding left out. The zstd frame states its content
size and carries no checksum; CRC-32C covers the frame. A decoder knows from its layout, and only
from there, how large each thing must be, and compares before it decompresses: a declared size
allocates nothing. Everything that does not fit raises PayloadError with one sentence.

Shape letters: B rows (blocks), N values per row.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import google_crc32c
import numpy as np
import zstandard
from jaxtyping import Float32, Int8, UInt16

from fragments.errors import NonFiniteError, PayloadError
from fragments.layout import FragmentLayout

INT8_CODEC = "int8-rms-zstd/1"
F32_CODEC = "f32-zstd/1"
CODECS = (INT8_CODEC, F32_CODEC)

MIN_STEP_BITS = (127 - 100) << 7
MAX_STEP_BITS = (127 + 100) << 7
"""Bits of the bfloat16 steps 2^-100 and 2^100; a step is 0 or lies between them, so that no product
of a step and a symbol is subnormal or infinite."""

DEFAULT_LEVEL = 1
"""Higher zstd levels search for matches that quantized noise does not have."""

_HEADER = struct.Struct("<4sIIQ")
_MAGIC = {INT8_CODEC: b"DLi1", F32_CODEC: b"DLf1"}


@dataclass(frozen=True, slots=True)
class Payload:
    """One encoded fragment.

    `raw_size`: bytes before compression. `crc32c`: of `data`, the zstd frame.
    """

    codec: str
    raw_size: int
    crc32c: int
    data: bytes


def raw_size(codec: str, fragment: FragmentLayout) -> int:
    """Bytes of this fragment in `codec` before compression. PayloadError for an unknown codec."""
    if codec == INT8_CODEC:
        return _HEADER.size + 2 * fragment.num_rows + fragment.num_values
    if codec == F32_CODEC:
        return _HEADER.size + 4 * fragment.num_values
    raise PayloadError(f"codec {codec!r} is not known here; known are {', '.join(CODECS)}")


def max_wire_bytes(codec: str, fragment: FragmentLayout) -> int:
    """The most bytes that a payload of this fragment may have: the bound for an Assembler."""
    size = raw_size(codec, fragment)
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
    steps_B = step_bits_B[: fragment.num_rows]
    raw, body = _start(INT8_CODEC, fragment)
    steps_end = 2 * fragment.num_rows
    body[:steps_end] = steps_B.astype("<u2").view(np.uint8)
    codes = body[steps_end:].view(np.int8)
    _gather(fragment, codes_BxN, codes)
    _check_int8(codes_BxN[: fragment.num_rows], steps_B, codes)
    return _compress(INT8_CODEC, raw, level)


def decode_int8(
    fragment: FragmentLayout, rows_padded: int, payload: Payload
) -> tuple[Int8[np.ndarray, "B N"], UInt16[np.ndarray, " B"]]:
    """Codes int8 (rows_padded, block) and step bits uint16 (rows_padded,); padding is 0.

    Raises PayloadError for anything that `encode_int8` would not have made of this fragment.
    """
    body = _decompress(INT8_CODEC, fragment, payload)
    steps_end = 2 * fragment.num_rows
    step_bits_B = np.zeros(rows_padded, np.uint16)
    step_bits_B[: fragment.num_rows] = body[:steps_end].view("<u2")
    codes = body[steps_end:].view(np.int8)
    codes_BxN = np.zeros((rows_padded, fragment.block), np.int8)
    _scatter(fragment, codes, codes_BxN)
    _check_int8(codes_BxN[: fragment.num_rows], step_bits_B[: fragment.num_rows], codes)
    return codes_BxN, step_bits_B


def encode_f32(
    fragment: FragmentLayout,
    blocks_BxN: Float32[np.ndarray, "B N"],
    level: int = DEFAULT_LEVEL,
) -> Payload:
    """Encodes a fragment value exactly.

    Raises NonFiniteError for a NaN or infinity, PayloadError for an array that does not fit.
    """
    _check_blocks(fragment, blocks_BxN, np.dtype(np.float32))
    raw, body = _start(F32_CODEC, fragment)
    values = body.view("<f4")
    _gather(fragment, blocks_BxN, values)
    if not np.isfinite(values).all():
        raise NonFiniteError(f"fragment {fragment.index} has values that are not finite")
    return _compress(F32_CODEC, raw, level)


def decode_f32(
    fragment: FragmentLayout, rows_padded: int, payload: Payload
) -> Float32[np.ndarray, "B N"]:
    """The fragment value, float32 (rows_padded, block), to the bit; padding is +0.

    Raises PayloadError for anything that `encode_f32` would not have made of this fragment.
    """
    values = _decompress(F32_CODEC, fragment, payload).view("<f4")
    if not np.isfinite(values).all():
        raise PayloadError("the payload has values that are not finite")
    blocks_BxN = np.zeros((rows_padded, fragment.block), np.float32)
    _scatter(fragment, values, blocks_BxN)
    return blocks_BxN


def _check_blocks(fragment: FragmentLayout, array: np.ndarray, dtype: np.dtype) -> None:
    fits = array.ndim == 2 and array.shape[0] >= fragment.num_rows
    if not fits or array.shape[1] != fragment.block or array.dtype != dtype:
        raise PayloadError(
            f"fragment {fragment.index} is {dtype}[>={fragment.num_rows}, {fragment.block}], but"
            f" {array.dtype}{list(array.shape)} was given"
        )


def _check_int8(
    codes_BxN: Int8[np.ndarray, "B N"],
    steps_B: UInt16[np.ndarray, " B"],
    codes: Int8[np.ndarray, " values"],
) -> None:
    """Steps and symbols are those that a quantizer makes; `codes` are the valid ones, flat."""
    # A set sign bit, an infinity or a NaN are all above MAX_STEP_BITS as integers.
    zero_B = steps_B == 0
    if not (zero_B | ((steps_B >= MIN_STEP_BITS) & (steps_B <= MAX_STEP_BITS))).all():
        raise PayloadError("the payload has a step outside 2^-100 to 2^100")
    if codes.size and codes.min() == -128:
        raise PayloadError("the payload has the symbol -128, which no quantizer makes")
    if zero_B.any() and codes_BxN[zero_B].any():
        raise PayloadError("the payload has symbols in a block whose step is 0")


def _start(codec: str, fragment: FragmentLayout) -> tuple[np.ndarray, np.ndarray]:
    """An uncompressed payload with its header written, and the body as a view of it."""
    raw = np.empty(raw_size(codec, fragment), np.uint8)
    raw[: _HEADER.size] = np.frombuffer(_header(codec, fragment), np.uint8)
    return raw, raw[_HEADER.size :]


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
    compressor = zstandard.ZstdCompressor(
        level=level, write_content_size=True, write_checksum=False, write_dict_id=False
    )
    data = compressor.compress(raw.data)
    return Payload(codec, raw.size, google_crc32c.value(data), data)


def _decompress(codec: str, fragment: FragmentLayout, payload: Payload) -> np.ndarray:
    """The body as uint8, after every check that needs no decompression, then the header's."""
    data = payload.data
    if google_crc32c.value(data) != payload.crc32c:
        raise PayloadError("the payload's checksum does not match: it was damaged on its way")
    if payload.codec != codec:
        raise PayloadError(f"the payload's codec is {payload.codec!r}; expected {codec!r}")
    expected = raw_size(codec, fragment)
    if payload.raw_size != expected:
        raise PayloadError(f"the payload declares {payload.raw_size} raw bytes, not {expected}")
    if len(data) > max_wire_bytes(codec, fragment):
        raise PayloadError(f"{len(data)} bytes are too many for a fragment of {expected} raw bytes")
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
