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

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int8, Int64, UInt8

from fragments.compiled import compiled
from fragments.errors import PayloadError
from fragments.slabs import empty

TRITS, NIBBLES, WIDE = 0, 1, 2

_MAX_TRIT, _MAX_NIBBLE = 1, 7
_TRIT_ESCAPED, _NIBBLE_ESCAPED = 64, 16
"""A row has the form if at most one symbol in so many lies outside. An escaped group costs five
bytes and an escaped symbol one, before the coder."""

_PROBE, _PROBE_ESCAPED = 256, 32
"""Symbols of a row that are looked at first, and at most one in how many of them may lie outside:
most rows are plainly no trits."""

_ESCAPE = -8
_LOW = np.uint8(15)
_ESCAPED_LOW = np.uint8(8)
GROUP = 5
"""Trits in a byte."""

ESCAPED_GROUP = 3**GROUP
"""The byte for a group that is escaped."""


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
    rows, width = codes_BxN.shape
    forms_B, escaped_B = np.empty(rows, np.uint8), np.empty(rows, np.int64)
    _choose_forms(codes_BxN, forms_B, escaped_B)
    is_trits, is_nibbles = forms_B == TRITS, forms_B == NIBBLES
    trits = empty((int(np.count_nonzero(is_trits)), row_bytes(TRITS, width)), np.uint8)
    trit_escapes = np.empty((escaped_B[is_trits].sum(), GROUP), np.int8)
    _pack_trits(codes_BxN, forms_B, escaped_B, trits, trit_escapes)
    nibbles = empty((int(np.count_nonzero(is_nibbles)), row_bytes(NIBBLES, width)), np.uint8)
    nibble_escapes = np.empty(escaped_B[is_nibbles].sum(), np.int8)
    _pack_nibbles(codes_BxN, forms_B, escaped_B, nibbles, nibble_escapes)
    return Packed(forms_B, trits, trit_escapes, nibbles, codes_BxN[forms_B == WIDE], nibble_escapes)


def unpack(packed: Packed, out_BxN: Int8[np.ndarray, "B N"]) -> None:
    """Undoes `pack`, into `out_BxN`. Raises PayloadError for what does not fit together."""
    out_BxN[packed.forms_B == WIDE] = packed.wide
    if (packed.trits > ESCAPED_GROUP).any():
        raise PayloadError("the payload has a byte that is no group of trits")
    escapes = packed.nibble_escapes
    beyond = _unpack_trits(packed.trits, packed.trit_escapes, packed.forms_B, out_BxN)
    found, beyond_nibbles = _unpack_nibbles(packed.nibbles, escapes, packed.forms_B, out_BxN)
    if beyond or beyond_nibbles:
        raise PayloadError("the payload has a symbol beyond the end of a block")
    if found != len(escapes):
        raise PayloadError(
            f"the payload lists {len(escapes)} escaped symbols, where there are {found}"
        )


@compiled
def _is_outside(symbol: np.int8, bound: int) -> np.bool_:
    """Whether a symbol lies outside -bound..bound."""
    return np.uint8(np.uint8(symbol) + np.uint8(bound)) > np.uint8(2 * bound)


@compiled
def _count_outside(symbols_N: Int8[np.ndarray, " N"], bound: int) -> int:
    count = 0
    for symbol in symbols_N:
        count += int(_is_outside(symbol, bound))
    return count


@compiled
def _mark_escaped(symbols_N: Int8[np.ndarray, " N"], marks: UInt8[np.ndarray, " fifth"]) -> int:
    """Marks with 1 the groups of a row of trits that are escaped; returns how many."""
    size = len(marks)
    marks[:] = np.uint8(0)
    for start in range(0, len(symbols_N), size):
        for j in range(min(size, len(symbols_N) - start)):
            marks[j] |= np.uint8(_is_outside(symbols_N[start + j], _MAX_TRIT))
    count = 0
    for mark in marks:
        count += mark
    return count


@compiled
def _choose_forms(
    codes_BxN: Int8[np.ndarray, "B N"],
    forms_B: UInt8[np.ndarray, " B"],
    escaped_B: Int64[np.ndarray, " B"],
) -> None:
    """The form of each row, and how many groups (trits) or symbols (nibbles) of it are escaped."""
    rows, width = codes_BxN.shape
    marks = np.empty((width + GROUP - 1) // GROUP, np.uint8)
    probed = min(width, _PROBE)
    for i in range(rows):
        symbols_N = codes_BxN[i]
        is_likely = _count_outside(symbols_N[:probed], _MAX_TRIT) * _PROBE_ESCAPED <= probed
        if is_likely and _count_outside(symbols_N, _MAX_TRIT) * _TRIT_ESCAPED <= width:
            forms_B[i], escaped_B[i] = TRITS, _mark_escaped(symbols_N, marks)
            continue
        escaped_B[i] = _count_outside(symbols_N, _MAX_NIBBLE)
        forms_B[i] = NIBBLES if escaped_B[i] * _NIBBLE_ESCAPED <= width else WIDE


@compiled
def _pack_trits(
    codes_BxN: Int8[np.ndarray, "B N"],
    forms_B: UInt8[np.ndarray, " B"],
    escaped_B: Int64[np.ndarray, " B"],
    packed: UInt8[np.ndarray, "trits fifth"],
    escapes: Int8[np.ndarray, "groups 5"],
) -> None:
    width, size = codes_BxN.shape[1], packed.shape[1]
    marks = np.empty(size, np.uint8)
    row = listed = 0
    for i in range(len(forms_B)):
        if forms_B[i] != TRITS:
            continue
        symbols_N, bytes_ = codes_BxN[i], packed[row]
        row += 1
        bytes_[:] = np.uint8(0)
        for k in range(GROUP - 1, -1, -1):
            start = k * size
            there = max(0, min(size, width - start))
            for j in range(there):
                bytes_[j] = bytes_[j] * np.uint8(3) + np.uint8(symbols_N[start + j] + np.int8(1))
            for j in range(there, size):
                bytes_[j] = bytes_[j] * np.uint8(3) + np.uint8(1)
        if escaped_B[i] == 0:
            continue
        _mark_escaped(symbols_N, marks)
        for j in range(size):
            if marks[j]:
                bytes_[j] = ESCAPED_GROUP
                for k in range(GROUP):
                    column = j + k * size
                    escapes[listed, k] = symbols_N[column] if column < width else np.int8(0)
                listed += 1


@compiled
def _unpack_trits(
    packed: UInt8[np.ndarray, "trits fifth"],
    escapes: Int8[np.ndarray, "groups 5"],
    forms_B: UInt8[np.ndarray, " B"],
    out_BxN: Int8[np.ndarray, "B N"],
) -> int:
    """As many escapes are listed as there are escaped groups. Returns how many symbols are not
    zero beyond the end of a row.
    """
    width, size = out_BxN.shape[1], packed.shape[1]
    trits = np.empty(size, np.uint8)
    row = listed = beyond = 0
    for i in range(len(forms_B)):
        if forms_B[i] != TRITS:
            continue
        symbols_N, bytes_ = out_BxN[i], packed[row]
        row += 1
        trits[:] = bytes_
        for k in range(GROUP):
            start = k * size
            there = max(0, min(size, width - start))
            for j in range(there):
                rest = trits[j] // np.uint8(3)
                symbols_N[start + j] = np.int8(trits[j] - rest * np.uint8(3)) - np.int8(1)
                trits[j] = rest
            for j in range(there, size):
                rest = trits[j] // np.uint8(3)
                is_zero = trits[j] - rest * np.uint8(3) == np.uint8(1)
                beyond += not is_zero and bytes_[j] != ESCAPED_GROUP
                trits[j] = rest
        for j in range(size):
            if bytes_[j] == ESCAPED_GROUP:
                for k in range(GROUP):
                    column = j + k * size
                    if column < width:
                        symbols_N[column] = escapes[listed, k]
                    else:
                        beyond += escapes[listed, k] != 0
                listed += 1
    return beyond


@compiled
def _pack_nibbles(
    codes_BxN: Int8[np.ndarray, "B N"],
    forms_B: UInt8[np.ndarray, " B"],
    escaped_B: Int64[np.ndarray, " B"],
    packed: UInt8[np.ndarray, "nibbles half"],
    escapes: Int8[np.ndarray, " escapes"],
) -> None:
    width, size = codes_BxN.shape[1], packed.shape[1]
    row = listed = 0
    for i in range(len(forms_B)):
        if forms_B[i] != NIBBLES:
            continue
        symbols_N, bytes_ = codes_BxN[i], packed[row]
        row += 1
        for j in range(width - size):
            high = np.uint8(symbols_N[size + j]) << np.uint8(4)
            bytes_[j] = np.uint8(symbols_N[j]) & _LOW | np.uint8(high)
        for j in range(width - size, size):
            bytes_[j] = np.uint8(symbols_N[j]) & _LOW
        if escaped_B[i] == 0:
            continue
        for column in range(width):
            if _is_outside(symbols_N[column], _MAX_NIBBLE):
                j = column % size
                if column < size:
                    bytes_[j] = bytes_[j] & ~_LOW | _ESCAPED_LOW
                else:
                    bytes_[j] = bytes_[j] & _LOW | np.uint8(_ESCAPED_LOW << np.uint8(4))
                escapes[listed] = symbols_N[column]
                listed += 1


@compiled
def _unpack_nibbles(
    packed: UInt8[np.ndarray, "nibbles half"],
    escapes: Int8[np.ndarray, " escapes"],
    forms_B: UInt8[np.ndarray, " B"],
    out_BxN: Int8[np.ndarray, "B N"],
) -> tuple[int, int]:
    """Returns how many escaped symbols there are, of which the first `len(escapes)` are undone,
    and how many symbols are not zero beyond the end of a row.
    """
    width, size = out_BxN.shape[1], packed.shape[1]
    row = found = beyond = 0
    for i in range(len(forms_B)):
        if forms_B[i] != NIBBLES:
            continue
        symbols_N, bytes_ = out_BxN[i], packed[row]
        row += 1
        for j in range(size):
            symbols_N[j] = np.int8(np.uint8(bytes_[j] << np.uint8(4))) >> np.int8(4)
        for j in range(width - size):
            symbols_N[size + j] = np.int8(bytes_[j]) >> np.int8(4)
        for j in range(width - size, size):
            beyond += bytes_[j] > _LOW
        escaped = 0
        for symbol in symbols_N:
            escaped += symbol == _ESCAPE
        if escaped == 0:
            continue
        for column in range(width):
            if symbols_N[column] == _ESCAPE:
                if found < len(escapes):
                    symbols_N[column] = escapes[found]
                found += 1
    return found, beyond
