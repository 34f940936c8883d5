"""zstd frames that no encoder of ours makes: bombs, lies about sizes, odd kinds of frames."""

from __future__ import annotations

import random
from functools import lru_cache

import zstandard

BOMB_MIB = (1, 4, 16)
"""Sizes of zeros that fit in the few KB that a payload of the campaign may have."""

_SKIPPABLE = 0x184D2A50
"""Magic numbers of skippable frames: this one and the 15 after it (RFC 8878, section 3.1.2)."""


def plain(raw: bytes, *, level: int = 1, sized: bool = True, checksum: bool = False) -> bytes:
    """One frame of `raw`."""
    compressor = zstandard.ZstdCompressor(
        level=level, write_content_size=sized, write_checksum=checksum
    )
    return compressor.compress(raw)


@lru_cache(maxsize=2 * len(BOMB_MIB))
def bomb(mib: int, *, sized: bool) -> bytes:
    """A frame of so many MiB of zeros, which states its size or does not."""
    return plain(bytes(mib << 20), sized=sized)


def claiming(frame: bytes, size: int) -> bytes:
    """A frame whose stated content size is replaced by `size`; it needs a field of 4 bytes."""
    descriptor = frame[4]
    if descriptor >> 6 != 2:
        raise ValueError("the frame states its size in another number of bytes than 4")
    at = 5 if descriptor >> 5 & 1 else 6
    return frame[:at] + size.to_bytes(4, "little") + frame[at + 4 :]


def windowed(raw: bytes, rng: random.Random) -> bytes:
    """A frame that asks its decoder for a window of up to 2^41 bytes (RFC 8878, 3.1.1.1.2) and
    holds `raw` uncompressed.
    """
    exponent, mantissa = rng.randrange(10, 32), rng.randrange(8)
    # No single segment; content size in 8 bytes; one last raw block.
    head = (0xFD2FB528).to_bytes(4, "little") + bytes([0xC0, exponent << 3 | mantissa])
    block = (len(raw) << 3 | 1).to_bytes(3, "little")
    return head + len(raw).to_bytes(8, "little") + block + raw


def skippable(size: int, rng: random.Random) -> bytes:
    """A frame that decoders pass over, of `size` bytes."""
    magic = _SKIPPABLE + rng.randrange(16)
    return magic.to_bytes(4, "little") + size.to_bytes(4, "little") + rng.randbytes(size)


def strange(raw: bytes, rng: random.Random) -> bytes:
    """`raw` in a frame that is not as ours are, or in several, or in none."""
    frame = plain(raw)
    cut = rng.randrange(len(raw) + 1)
    match rng.randrange(8):
        case 0:
            return plain(raw, sized=False)
        case 1:
            return plain(raw, level=19, checksum=True)
        case 2:
            return skippable(len(raw), rng)
        case 3:
            return skippable(rng.randrange(16), rng) + frame
        case 4:
            return plain(raw[:cut]) + plain(raw[cut:])
        case 5:
            return frame[4:]
        case 6:
            return windowed(raw, rng)
        case _:
            return raw


def explosive(raw_size: int, rng: random.Random) -> bytes:
    """A bomb: honest about its size, silent about it, or lying that it is `raw_size`."""
    mib = rng.choice(BOMB_MIB)
    match rng.randrange(4):
        case 0:
            return bomb(mib, sized=True)
        case 1:
            return bomb(mib, sized=False)
        case 2:
            return claiming(bomb(mib, sized=True), raw_size)
        case _:
            inner = bomb(16, sized=True)
            return plain(inner)
