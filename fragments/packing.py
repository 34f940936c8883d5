"""Symbols of quantized blocks in fewer bytes, for an entropy coder to go on from.

At a step of about the block's RMS hardly any symbol lies outside -7..7, at twice that hardly any
outside -1..1. So several share a byte: less for the coder to go through, and groups that it codes
closer to their entropy than single symbols. A row (block) of N symbols has one of three forms:

    trits    ceil(N / 5) bytes: byte j is the sum of 3^k (1 + symbol j + k ceil(N / 5)), k = 0..4;
             243 stands for five symbols that are in the list of escapes
    nibbles  ceil(N / 2) bytes: symbol j in the low and symbol j + ceil(N / 2) in the high nibble of
             byte j, in two's complement; -8 stands for a symbol that is in the list of escapes
    wide     N bytes, the symbols themselves

Symbols beyond the end of a row are 0. Shape letters: B rows, N symbols per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int8, Int64, UInt8

from fragments.errors import PayloadError

TRITS, NIBBLES, WIDE = 0, 1, 2

_MAX_TRIT, _MAX_NIBBLE = 1, 7
_TRIT_ESCAPED, _NIBBLE_ESCAPED = 64, 16
"""A row has the form if at most one symbol in so many lies outside. An escaped group costs five
bytes and an escaped symbol one, before the coder."""

_PROBE, _PROBE_ESCAPED = 256, 32
"""Symbols of a row that are looked at first, and at most one in how many of them may lie outside:
most rows are plainly no trits."""

_ESCAPE = -8
_NIBBLE = np.uint8(4)
_LOW = np.uint8(15)
_ESCAPE_LOW = np.uint8(8)
GROUP = 5
"""Trits in a byte."""

ESCAPED_GROUP = 3**GROUP
"""The byte for a group that is escaped."""

_ROWS_AT_ONCE = 64
"""A quarter of a MiB at the usual block: what is being packed stays in the core's cache."""

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed array: the form of each row, and the rows of each form with their escapes."""

    forms_B: UInt8[np.ndarray, " B"]
    trits: UInt8[np.ndarray, "trits fifth"]
    trit_escapes: Int8[np.ndarray, "groups 5"]
    nibbles: UInt8[np.ndarray, "nibbles half"]
    wide: Int8[np.ndarray, "wide N"]
    nibble_escapes: Int8[np.ndarray, " escapes"]


def row_bytes(form: int, width: int) -> int:
    """Bytes of a row of `width` symbols in that form, without its escapes."""
    return {TRITS: -(-width // GROUP), NIBBLES: -(-width // 2), WIDE: width}[form]


def pack(codes_BxN: Int8[np.ndarray, "B N"]) -> Packed:
    """Packs symbols in -127..127. The same array always gives the same."""
    forms_B, beyond = _choose_forms(codes_BxN)
    trits, trit_escapes = _pack_trits(_rows_of(TRITS, forms_B, codes_BxN))
    nibbles, nibble_escapes = _pack_nibbles(_rows_of(NIBBLES, forms_B, codes_BxN), forms_B, beyond)
    wide = _rows_of(WIDE, forms_B, codes_BxN)
    return Packed(forms_B, trits, trit_escapes, nibbles, wide, nibble_escapes)


def unpack(packed: Packed, out_BxN: Int8[np.ndarray, "B N"]) -> None:
    """Undoes `pack`, into `out_BxN`. Raises PayloadError for what does not fit together."""
    if (packed.forms_B == NIBBLES).all():
        _unpack_nibbles(packed, out_BxN)
        return
    for form, unpack_form in ((TRITS, _unpack_trits), (NIBBLES, _unpack_nibbles)):
        here = packed.forms_B == form
        rows_BxN = np.empty((np.count_nonzero(here), out_BxN.shape[1]), np.int8)
        unpack_form(packed, rows_BxN)
        out_BxN[here] = rows_BxN
    out_BxN[packed.forms_B == WIDE] = packed.wide


_Positions = tuple[Int64[np.ndarray, " found"], Int64[np.ndarray, " found"]]


def _choose_forms(
    codes_BxN: Int8[np.ndarray, "B N"],
) -> tuple[UInt8[np.ndarray, " B"], _Positions]:
    """The form of each row, and where the symbols are that fit no nibble."""
    width = codes_BxN.shape[1]
    beyond = _positions(codes_BxN, _is_beyond_nibble)
    forms_B = np.full(len(codes_BxN), NIBBLES, np.uint8)
    escaped_B = np.bincount(beyond[0], minlength=len(codes_BxN))
    forms_B[escaped_B * _NIBBLE_ESCAPED > width] = WIDE
    probed = _outside(codes_BxN[:, :_PROBE], _MAX_TRIT)
    likely = np.flatnonzero(np.count_nonzero(probed, axis=1) * _PROBE_ESCAPED <= probed.shape[1])
    outside = np.count_nonzero(_outside(codes_BxN[likely], _MAX_TRIT), axis=1)
    forms_B[likely[outside * _TRIT_ESCAPED <= width]] = TRITS
    return forms_B, beyond


def _pack_trits(
    codes_BxN: Int8[np.ndarray, "B N"],
) -> tuple[UInt8[np.ndarray, "B fifth"], Int8[np.ndarray, "groups 5"]]:
    size = row_bytes(TRITS, codes_BxN.shape[1])
    packed = np.zeros((len(codes_BxN), size), np.uint8)
    escapes = [np.zeros((0, GROUP), np.int8)]
    for rows in _groups(len(codes_BxN)):
        fifths = _fifths(codes_BxN[rows], size)
        bytes_ = packed[rows]
        for fifth in reversed(fifths):
            bytes_ *= np.uint8(3)
            bytes_ += (fifth + np.int8(1)).view(np.uint8)
        most = np.maximum.reduce((fifths + np.int8(1)).view(np.uint8))
        escaped = most > np.uint8(2)
        bytes_[escaped] = ESCAPED_GROUP
        escapes.append(fifths[:, escaped].T)
    return packed, np.concatenate(escapes)


def _fifths(codes_BxN: Int8[np.ndarray, "B N"], size: int) -> Int8[np.ndarray, "5 B fifth"]:
    """The rows in five parts, one after the other, with zeros beyond their end."""
    fifths = np.zeros((GROUP, len(codes_BxN), size), np.int8)
    for k in range(GROUP):
        part = codes_BxN[:, k * size : (k + 1) * size]
        fifths[k, :, : part.shape[1]] = part
    return fifths


def _unpack_trits(packed: Packed, out_BxN: Int8[np.ndarray, "B N"]) -> None:
    width = out_BxN.shape[1]
    size = row_bytes(TRITS, width)
    start = 0
    for rows in _groups(len(out_BxN)):
        trits = packed.trits[rows]
        escaped = trits == ESCAPED_GROUP
        if (trits > ESCAPED_GROUP).any():
            raise PayloadError("the payload has a byte that is no group of trits")
        stop = start + int(np.count_nonzero(escaped))
        for k in range(GROUP):
            trits, fifth = _next_trit(trits)
            fifth[escaped] = packed.trit_escapes[start:stop, k]
            part = out_BxN[rows, k * size : (k + 1) * size]
            part[:] = fifth[:, : part.shape[1]]
            _check_nothing_beyond(fifth[:, part.shape[1] :])
        start = stop


def _next_trit(
    trits: UInt8[np.ndarray, "B fifth"],
) -> tuple[UInt8[np.ndarray, "B fifth"], Int8[np.ndarray, "B fifth"]]:
    """What is left without the last trit, and that trit as a symbol."""
    rest = trits // np.uint8(3)
    return rest, (trits - rest * np.uint8(3)).view(np.int8) - np.int8(1)


def _pack_nibbles(
    codes_BxN: Int8[np.ndarray, "B N"], forms_B: UInt8[np.ndarray, " all"], beyond: _Positions
) -> tuple[UInt8[np.ndarray, "B half"], Int8[np.ndarray, " escapes"]]:
    size = row_bytes(NIBBLES, codes_BxN.shape[1])
    packed = np.empty((len(codes_BxN), size), np.uint8)
    for group in _groups(len(codes_BxN)):
        symbols = codes_BxN[group].view(np.uint8)
        np.bitwise_and(symbols[:, :size], _LOW, out=packed[group])
        high = symbols[:, size:] << _NIBBLE
        packed[group, : high.shape[1]] |= high
    is_here = forms_B == NIBBLES
    kept = is_here[beyond[0]]
    rows, columns = (np.cumsum(is_here) - 1)[beyond[0][kept]], beyond[1][kept]
    is_low = columns < size
    low, high_at = (rows[is_low], columns[is_low]), (rows[~is_low], columns[~is_low] - size)
    packed[low] = packed[low] & ~_LOW | _ESCAPE_LOW
    packed[high_at] = packed[high_at] & _LOW | _ESCAPE_LOW << _NIBBLE
    return packed, codes_BxN[rows, columns]


def _unpack_nibbles(packed: Packed, out_BxN: Int8[np.ndarray, "B N"]) -> None:
    width, size = out_BxN.shape[1], row_bytes(NIBBLES, out_BxN.shape[1])
    if width % 2:
        _check_nothing_beyond(packed.nibbles[:, -1] >> _NIBBLE)
    for group in _groups(len(out_BxN)):
        low, high = out_BxN[group, :size], out_BxN[group, size:]
        np.left_shift(packed.nibbles[group], _NIBBLE, out=low.view(np.uint8))
        np.right_shift(low, np.int8(_NIBBLE), out=low)
        signed = packed.nibbles[group, : width - size].view(np.int8)
        np.right_shift(signed, np.int8(_NIBBLE), out=high)
    rows, columns = _positions(out_BxN, _is_escape)
    if len(rows) != len(packed.nibble_escapes):
        raise PayloadError(f"the payload lists {len(packed.nibble_escapes)} escaped symbols, where"
                           f" there are {len(rows)}")  # fmt: skip
    out_BxN[rows, columns] = packed.nibble_escapes


def _check_nothing_beyond(symbols: np.ndarray) -> None:
    if symbols.any():
        raise PayloadError("the payload has a symbol beyond the end of a block")


def _rows_of(
    form: int, forms_B: UInt8[np.ndarray, " B"], codes_BxN: Int8[np.ndarray, "B N"]
) -> Int8[np.ndarray, "rows N"]:
    here = forms_B == form
    return codes_BxN if here.all() else codes_BxN[here]


def _positions(
    codes_BxN: Int8[np.ndarray, "B N"], is_wanted: Callable[[np.ndarray], np.ndarray]
) -> _Positions:
    """Rows and columns of the symbols that are wanted, all of which fit no nibble."""
    rows, columns = [_NONE], [_NONE]
    for group in _groups(len(codes_BxN)):
        symbols = codes_BxN[group]
        if symbols.size and (symbols.min() < -_MAX_NIBBLE or symbols.max() > _MAX_NIBBLE):
            row, column = np.divmod(np.flatnonzero(is_wanted(symbols)), symbols.shape[1])
            rows.append(row + group.start)
            columns.append(column)
    return np.concatenate(rows), np.concatenate(columns)


def _outside(codes: Int8[np.ndarray, "*shape"], bound: int) -> Bool[np.ndarray, "*shape"]:
    """Which symbols lie outside -bound..bound."""
    outside: np.ndarray = codes.view(np.uint8) + np.uint8(bound) > np.uint8(2 * bound)
    return outside


def _is_beyond_nibble(codes: Int8[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
    return _outside(codes, _MAX_NIBBLE)


def _is_escape(codes: Int8[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
    escape: np.ndarray = codes == np.int8(_ESCAPE)
    return escape


def _groups(rows: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS_AT_ONCE) for start in range(0, rows, _ROWS_AT_ONCE))
