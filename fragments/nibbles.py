"""Int8 symbols of quantized blocks as nibbles, with an escape for the few that do not fit.

At a step of about the block's RMS hardly any symbol lies outside -7..7, so two of them share a
byte: half as much for the entropy coder to go through, and pairs that it codes closer to their
entropy than single symbols. A row (block) is *narrow* or *wide*:

    narrow   ceil(N / 2) bytes: symbol j in the low and symbol ceil(N / 2) + j in the high nibble of
             byte j, in two's complement; -8 stands for a symbol that is in the list of escapes
    wide     N bytes, the symbols themselves: a row of which more than one in 16 would be escaped

One array has but one packed form. Shape letters: B rows, N symbols per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int8, Int64, UInt8

from fragments.errors import PayloadError

MAX_NARROW = 7
_ESCAPE = -8
_NIBBLE = np.uint8(4)
_LOW = np.uint8(15)
_ESCAPE_LOW = np.uint8(8)
_ESCAPED_AT_MOST = 16
"""A row is wide when more than one symbol in this many would be escaped."""

_ROWS_AT_ONCE = 64
"""A quarter of a MiB at the usual block: what is being packed stays in the core's cache."""

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed array: which rows are wide, the narrow rows' bytes, the wide ones', the escapes."""

    wide_B: Bool[np.ndarray, " B"]
    narrow: UInt8[np.ndarray, "narrow half"]
    wide: Int8[np.ndarray, "wide N"]
    escapes: Int8[np.ndarray, " escapes"]


def half(width: int) -> int:
    """Bytes of a narrow row of `width` symbols."""
    return (width + 1) // 2


def pack(codes_BxN: Int8[np.ndarray, "B N"]) -> Packed:
    """Packs symbols in -127..127."""
    rows, columns = _positions(codes_BxN, _is_beyond)
    wide_B = _is_wide(rows, codes_BxN.shape)
    narrow_BxN = codes_BxN
    if wide_B.any():
        narrow_BxN = codes_BxN[~wide_B]
        kept = ~wide_B[rows]
        rows, columns = (np.cumsum(~wide_B) - 1)[rows[kept]], columns[kept]
    size = half(codes_BxN.shape[1])
    packed = np.empty((len(narrow_BxN), size), np.uint8)
    for group in _groups(len(narrow_BxN)):
        _pack_rows(narrow_BxN[group], packed[group])
    is_low = columns < size
    low, high = (rows[is_low], columns[is_low]), (rows[~is_low], columns[~is_low] - size)
    packed[low] = packed[low] & ~_LOW | _ESCAPE_LOW
    packed[high] = packed[high] & _LOW | _ESCAPE_LOW << _NIBBLE
    return Packed(wide_B, packed, codes_BxN[wide_B], narrow_BxN[rows, columns])


def unpack(packed: Packed, out_BxN: Int8[np.ndarray, "B N"]) -> None:
    """Undoes `pack`, into `out_BxN`.

    Raises PayloadError for anything that `pack` would not have made.
    """
    if not packed.wide_B.any():
        _unpack_narrow(packed, out_BxN)
        return
    narrow_BxN = np.empty((len(packed.narrow), out_BxN.shape[1]), np.int8)
    _unpack_narrow(packed, narrow_BxN)
    out_BxN[~packed.wide_B] = narrow_BxN
    out_BxN[packed.wide_B] = packed.wide
    rows, _ = _positions(packed.wide, _is_beyond)
    if not _is_wide(rows, packed.wide.shape).all():
        raise PayloadError("the payload has a wide block that should be narrow")


def _unpack_narrow(packed: Packed, out_BxN: Int8[np.ndarray, "B N"]) -> None:
    width, size = out_BxN.shape[1], half(out_BxN.shape[1])
    if width % 2 and (packed.narrow[:, -1] >> _NIBBLE).any():
        raise PayloadError("the payload has a symbol beyond the end of a block")
    for group in _groups(len(out_BxN)):
        low, high = out_BxN[group, :size], out_BxN[group, size:]
        np.left_shift(packed.narrow[group], _NIBBLE, out=low.view(np.uint8))
        np.right_shift(low, np.int8(_NIBBLE), out=low)
        signed = packed.narrow[group, : width - size].view(np.int8)
        np.right_shift(signed, np.int8(_NIBBLE), out=high)
    rows, columns = _positions(out_BxN, _is_escape)
    if len(rows) != len(packed.escapes):
        raise PayloadError(f"the payload lists {len(packed.escapes)} escaped symbols, where there"
                           f" are {len(rows)}")  # fmt: skip
    if not _is_beyond(packed.escapes).all():
        raise PayloadError("the payload has an escaped symbol that fits a nibble")
    if _is_wide(rows, out_BxN.shape).any():
        raise PayloadError("the payload has a narrow block that should be wide")
    out_BxN[rows, columns] = packed.escapes


def _pack_rows(codes_BxN: Int8[np.ndarray, "B N"], out: UInt8[np.ndarray, "B half"]) -> None:
    symbols, size = codes_BxN.view(np.uint8), out.shape[1]
    np.bitwise_and(symbols[:, :size], _LOW, out=out)
    high = symbols[:, size:] << _NIBBLE
    out[:, : high.shape[1]] |= high


def _positions(
    codes_BxN: Int8[np.ndarray, "B N"], is_wanted: Callable[[np.ndarray], np.ndarray]
) -> tuple[Int64[np.ndarray, " found"], Int64[np.ndarray, " found"]]:
    """Rows and columns of the symbols that are wanted, all of which lie beyond -7..7."""
    rows, columns = [_NONE], [_NONE]
    for group in _groups(len(codes_BxN)):
        symbols = codes_BxN[group]
        if symbols.size and (symbols.min() < -MAX_NARROW or symbols.max() > MAX_NARROW):
            row, column = np.divmod(np.flatnonzero(is_wanted(symbols)), symbols.shape[1])
            rows.append(row + group.start)
            columns.append(column)
    return np.concatenate(rows), np.concatenate(columns)


def _is_beyond(codes: Int8[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
    outside: np.ndarray = codes.view(np.uint8) + np.uint8(MAX_NARROW) > np.uint8(2 * MAX_NARROW)
    return outside


def _is_escape(codes: Int8[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
    escape: np.ndarray = codes == np.int8(_ESCAPE)
    return escape


def _is_wide(rows: Int64[np.ndarray, " escaped"], shape: tuple[int, ...]) -> Bool[np.ndarray, " B"]:
    """Which of `shape` rows are wide, given the row of each symbol that would be escaped."""
    too_many: np.ndarray = np.bincount(rows, minlength=shape[0]) * _ESCAPED_AT_MOST > shape[1]
    return too_many


def _groups(rows: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS_AT_ONCE) for start in range(0, rows, _ROWS_AT_ONCE))
