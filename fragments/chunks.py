"""Cutting a payload into chunks and putting it together again, within a bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fragments.errors import PayloadError

CHUNK_BYTES = 1 << 20
"""1 MiB is where gRPC over loopback is fastest; 64 KiB and 64 MiB both are 3 to 5 times slower."""


class Chunk(NamedTuple):
    """`data` belongs at byte `offset` of the payload."""

    offset: int
    data: bytes


def split(data: bytes, chunk_bytes: int = CHUNK_BYTES, offset: int = 0) -> Iterator[Chunk]:
    """Chunks of `data` from byte `offset` on, in order, each of `chunk_bytes` but the last.

    Nothing when `offset` is at the end. Raises PayloadError for an offset outside the data.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be at least 1")
    if not 0 <= offset <= len(data):
        raise PayloadError(f"cannot resume at byte {offset} of a payload of {len(data)} bytes")
    return (
        Chunk(start, data[start : start + chunk_bytes])
        for start in range(offset, len(data), chunk_bytes)
    )


class Assembler:
    """Takes the chunks of one payload in order; never holds more than was declared and allowed.

    Args:
        total_bytes: what the sender declares.
        limit: the most that the receiver takes.

    Raises PayloadError when the declared size is not in [1, limit].
    """

    def __init__(self, total_bytes: int, limit: int) -> None:
        if not 1 <= total_bytes <= limit:
            raise PayloadError(
                f"a payload of {total_bytes} bytes is declared; between 1 and {limit} are taken"
            )
        self._total_bytes = total_bytes
        # It grows with what arrives: a declared size allocates nothing.
        self._buffer = bytearray()

    @property
    def received(self) -> int:
        """Bytes taken so far, which is the offset at which a broken transfer resumes."""
        return len(self._buffer)

    @property
    def complete(self) -> bool:
        """Whether all declared bytes are here."""
        return len(self._buffer) == self._total_bytes

    def append(self, offset: int, data: bytes) -> int:
        """Takes the next chunk and returns `received`.

        Raises PayloadError, and takes nothing, for a chunk that is empty, that does not start at
        `received` (a repetition or a gap), or that passes the declared size.
        """
        if offset != len(self._buffer):
            raise PayloadError(f"a chunk starts at byte {offset}; expected {len(self._buffer)}")
        if not data:
            raise PayloadError(f"the chunk at byte {offset} is empty")
        if offset + len(data) > self._total_bytes:
            raise PayloadError(
                f"the chunk at byte {offset} ends at {offset + len(data)}, past the declared"
                f" {self._total_bytes} bytes"
            )
        self._buffer += data
        return len(self._buffer)

    def finish(self) -> bytes:
        """The whole payload. Raises PayloadError while bytes are missing."""
        if not self.complete:
            raise PayloadError(
                f"the payload ends after {len(self._buffer)} of {self._total_bytes} bytes"
            )
        return bytes(self._buffer)
