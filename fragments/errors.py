"""The domain errors that every room shares. Their messages are sentences for people."""

from __future__ import annotations


class DilocoError(Exception):
    """Anything that this project refuses or cannot do; the message says why."""


class LayoutError(DilocoError):
    """A parameter tree or a layout that cannot be synchronised as it is."""


class PayloadError(DilocoError):
    """Bytes from the wire or the disk that are not what the layout says they must be."""


class NonFiniteError(DilocoError):
    """A NaN, an infinity or a value too large to encode, where only finite values may go."""
