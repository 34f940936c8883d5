"""Whether the write-ahead log of a sqlite database has a hole.

Sqlite takes a log up to the first frame that is not whole, and says nothing of what follows: right
after a power cut, where only what was never synced may be torn, and wrong where the disk has
altered what it had. So what follows is looked at before sqlite opens the log.
(https://www.sqlite.org/fileformat2.html#the_write_ahead_log)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = 0x377F0682
"""Of sums over little-endian words; over big-endian ones it is one more."""

_MOST_TORN = 1
"""Commits after the first torn frame that a power cut may leave: pages of the last transaction may
reach the disk in any order.
"""


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame of the log's present use. `is_commit`: the last of a transaction."""

    is_commit: bool
    is_whole: bool


def has_hole(log: Path) -> bool:
    """Whether transactions follow on a frame that is not what was written. A log that ends too soon
    is not told from one to which nothing more was written.

    Raises OSError.
    """
    try:
        data = log.read_bytes()
    except FileNotFoundError:
        return False
    if any(data[: _HEADER.size]) and not _has_whole_header(data):
        return True  # It is less than what a disk writes at once.
    frames = list(_frames(data))
    torn = next((n for n, frame in enumerate(frames) if not frame.is_whole), len(frames))
    return sum(frame.is_commit for frame in frames[torn + 1 :]) > _MOST_TORN


def _frames(data: bytes) -> Iterator[_Frame]:
    """All, those that do not belong to the log's present use as not whole."""
    if not _has_whole_header(data):
        return
    magic, _, page_bytes, _, *salts, one, two = _HEADER.unpack_from(data)
    order = _order(magic)
    is_whole, sums, start = True, (one, two), _HEADER.size
    while page_bytes and start + _FRAME.size + page_bytes <= len(data):
        _, database_pages, *frame_salts, one, two = _FRAME.unpack_from(data, start)
        begin = start + _FRAME.size
        if is_whole:
            sums = _sum(data[start : start + 8], order, sums)
            sums = _sum(data[begin : begin + page_bytes], order, sums)
            is_whole = frame_salts == salts and sums == (one, two)
        # What is left of an earlier use of the log has other salts.
        yield _Frame(frame_salts == salts and database_pages > 0, is_whole)
        start = begin + page_bytes


def _has_whole_header(data: bytes) -> bool:
    if len(data) < _HEADER.size:
        return False
    magic, *_, one, two = _HEADER.unpack_from(data)
    summed = data[: _HEADER.size - 8]
    return magic in (_MAGIC, _MAGIC + 1) and _sum(summed, _order(magic), (0, 0)) == (one, two)


def _order(magic: int) -> str:
    """Of the words that are summed up, as numpy names it."""
    return "<u4" if magic == _MAGIC else ">u4"


def _sum(data: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    """Sqlite's checksum, gone on with."""
    one, two = sums
    words = np.frombuffer(data, order).tolist()
    for first, second in zip(words[::2], words[1::2], strict=True):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return one, two
