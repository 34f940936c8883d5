"""Small JSON documents that say whether the disk kept what was written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import google_crc32c

SEAL = "crc32c_of_the_rest"
"""The key of the checksum."""


def seal(document: Mapping[str, Any]) -> bytes:
    """The document as JSON, to be read by people, with a CRC-32C of all else that it says.

    It protects from nobody who means harm.
    """
    return json.dumps({**document, SEAL: _crc32c(document)}, indent=1).encode()


def unseal(data: bytes, known_format: int | None = None) -> dict[str, Any]:
    """The document, without its checksum. Raises ValueError where it is not what was written, has
    none, or its "format" is not `known_format` (None: whatever it is).
    """
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    found = document.get("format")
    if known_format is not None and found != known_format:
        raise ValueError(f"format {found} is not {known_format}: use the matching release")
    found = document.pop(SEAL, None)
    if found != _crc32c(document):
        raise ValueError("it is not what was written (its checksum differs)")
    return document


def _crc32c(document: Mapping[str, Any]) -> int:
    """Of what it says, not of how that is laid out."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return int(google_crc32c.value(text.encode()))
