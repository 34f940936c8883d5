"""Safetensors files, written piece by piece, in any order of the pieces.

The library's own writer wants all tensors of a file at once, which for a snapshot would be those of
the whole model, each held until the last byte is written. What is written here it reads.

A file is a header, which says where each tensor lies, and the tensors' bytes (little-endian,
row-major). A *piece* is a run of tensors that follow one another.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import google_crc32c
import numpy as np

from fragments.disk import Disk

_LENGTH = struct.Struct("<Q")
_DTYPES = {
    "bool": "BOOL", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16",
    "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32",
    "int64": "I64", "uint64": "U64", "float64": "F64",
}  # fmt: skip
_WRITE_BYTES = 1 << 20
"""What is summed up is written while it is still in the cache."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """What the header says of a tensor; `dtype` as numpy names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Checksum(NamedTuple):
    """CRC-32C of so many bytes of a file, which follow those of the checksum before."""

    num_bytes: int
    crc32c: int


class TensorWriter:
    """A file that is being written; a context manager. Raises OSError.

    Args:
        disk: where it is written.
        path: written anew.
        pieces: the tensors of each piece, in the order of the file.
        words: what else the header's metadata says.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        pieces: Sequence[Sequence[Tensor]],
        words: Mapping[str, str] | None = None,
    ) -> None:
        self._pieces = pieces
        header = _header(pieces, words or {})
        self._sums: list[Checksum | None] = [Checksum(len(header), google_crc32c.value(header))]
        self._starts = []
        start = len(header)
        for piece in pieces:
            self._starts.append(start)
            self._sums.append(None)
            start += sum(tensor.num_bytes for tensor in piece)
        self._file = disk.open(path)
        try:
            self._file.write(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, index: int, values: Iterable[np.ndarray]) -> None:
        """Write a piece: the values of its tensors, taken one by one; none is kept or copied.

        Raises ValueError for values that are not those announced.
        """
        self._file.seek(self._starts[index])
        crc = num_bytes = 0
        for tensor, array in zip(self._pieces[index], values, strict=True):
            if (array.dtype.name, array.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"{tensor.name} is {array.dtype}{list(array.shape)}, not {tensor}")
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            flat = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
            for start in range(0, flat.size, _WRITE_BYTES):
                chunk = flat[start : start + _WRITE_BYTES]
                crc = google_crc32c.extend(crc, chunk)
                self._file.write(chunk.data)
            num_bytes += flat.size
        self._sums[1 + index] = Checksum(num_bytes, crc)

    def finish(self) -> tuple[Checksum, ...]:
        """Make the file durable. Returns the checksums of header and pieces, in the file's order.

        Raises ValueError while a piece is missing.
        """
        whole = tuple(each for each in self._sums if each is not None)
        if len(whole) != len(self._sums):
            raise ValueError(f"{len(self._sums) - len(whole)} pieces have not been written")
        self._file.sync()
        return whole


def write_summed(disk: Disk, path: Path, data: bytes) -> tuple[Checksum, ...]:
    """Write a small file durably; its checksum."""
    with disk.open(path) as file:
        file.write(data)
        file.sync()
    return (Checksum(len(data), google_crc32c.value(data)),)


def check(path: Path, sums: Iterable[tuple[int, int]]) -> None:
    """Raise ValueError unless the file is what its checksums were taken of."""
    with path.open("rb") as file:
        for num_bytes, expected in sums:
            crc, left = 0, num_bytes
            while left and (chunk := file.read(min(left, _WRITE_BYTES))):
                crc = google_crc32c.extend(crc, chunk)
                left -= len(chunk)
            if left or crc != expected:
                raise ValueError(f"{path.name} does not match its checksum")
        if file.read(1):
            raise ValueError(f"{path.name} is longer than its checksums say")


def _header(pieces: Sequence[Sequence[Tensor]], words: Mapping[str, str]) -> bytes:
    """The length, and where each tensor lies; padded, so that the first tensor is aligned."""
    record: dict[str, object] = {"__metadata__": {"format": "np", **words}}
    start = 0
    for tensor in (tensor for piece in pieces for tensor in piece):
        stop = start + tensor.num_bytes
        record[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH.size)
    return _LENGTH.pack(len(text)) + text
