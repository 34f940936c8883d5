"""The domain errors that every room shares. Their messages are sentences for people."""

from __future__ import annotations

from enum import StrEnum


class DilocoError(Exception):
    """Anything that this project refuses or cannot do; the message says why."""


class LayoutError(DilocoError):
    """A parameter tree or a layout that cannot be synchronised as it is."""


class PayloadError(DilocoError):
    """Bytes from the wire or the disk that are not what the layout says they must be."""


class NonFiniteError(DilocoError):
    """A NaN, an infinity or a value too large to encode, where only finite values may go."""


class SettingsError(DilocoError):
    """A setting that is unknown, malformed or contradicts another."""


class RunDirectoryError(DilocoError):
    """A run directory that is missing, damaged, in use, or of another version."""


class CheckpointError(DilocoError):
    """A learner's checkpoint that cannot be written, or is that of another."""


class DataError(DilocoError):
    """A text corpus that is missing, malformed or too small."""


class RefusalCode(StrEnum):
    """Why the server did not take something; see `diloco.v1.RefusalCode`."""

    FENCED = "fenced"
    LEASE_LOST = "lease_lost"
    OLD_EPOCH = "old_epoch"
    CONSUMED = "consumed"
    STALE = "stale"
    BAD_PAYLOAD = "bad_payload"
    MISMATCH = "mismatch"
    FULL = "full"
    NOT_TRAINING = "not_training"
    EVICTED = "evicted"


class RefusedError(DilocoError):
    """The outer server refuses a call for `code`; the message is its reason."""

    def __init__(self, code: RefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class ForbiddenError(DilocoError):
    """Whoever calls may not do this from where it is."""


class UnreachableError(DilocoError):
    """The outer server did not answer in the bounded number of tries."""


class BusyError(DilocoError):
    """A bounded queue is full: try again a little later."""


class StorageError(BusyError):
    """The disk is full or failing: nothing can be taken until it is not."""
