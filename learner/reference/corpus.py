"""The reference corpus: documents as bytes, a manifest, and a train/held-out split by document.

The default needs no network: every machine with Python has the standard library's own source.
`userdata` reads a user's files instead. What comes out is the same `Corpus` either way, and this
module imports no jax.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from fragments.errors import DataError

HELD_OUT_SHARE = 0.05
"""Share of the bytes that `split` aims to hold out."""

MIN_CORPUS_BYTES = 16 * 1024
"""Below this a held-out part would be too short to say anything."""

_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True, slots=True)
class Document:
    """One piece of text: `name` is a relative posix path (with a part's number if it was cut)."""

    name: str
    content: bytes

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of the content, whatever its name."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """What the manifest says of one document."""

    name: str
    size_bytes: int
    sha256: str
    held_out: bool


@dataclass(frozen=True, eq=False, slots=True)
class Corpus:
    """Train and held-out bytes, each the concatenation of its documents in manifest order."""

    name: str
    train: UInt8[np.ndarray, " train_bytes"]
    held_out: UInt8[np.ndarray, " held_out_bytes"]
    manifest: tuple[ManifestEntry, ...]
    manifest_digest: str
    """Hex SHA-256 over (name, size, content hash, side) of every document in order."""


def standard_library() -> Corpus:
    """The running Python's standard library, `*.py` without its tests; 9 to 13 MB, under 2 s.

    Cached: one process reads it once. Another Python version has another text, which the manifest
    digest shows.

    Raises:
        DataError: when the standard library is not installed as source files.
    """
    return _load_standard_library(sysconfig.get_paths()["stdlib"])


@lru_cache(maxsize=1)
def _load_standard_library(root: str) -> Corpus:
    documents = [
        Document(path.relative_to(root).as_posix(), path.read_bytes())
        for path in _python_sources(Path(root))
    ]
    if not documents:
        raise DataError(
            "this Python has no standard library source (*.py) to train on; name your own text "
            "with --data"
        )
    return build_corpus("python-standard-library", documents)


def _python_sources(root: Path) -> Iterable[Path]:
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _SKIPPED_DIRECTORIES]
        for name in files:
            path = Path(directory, name)
            # A distribution may link a file here to one that it does not install.
            if name.endswith(".py") and path.is_file():
                yield path


def build_corpus(name: str, documents: Iterable[Document]) -> Corpus:
    """Sorts `documents` by name, splits them and writes the manifest. Pure.

    Raises:
        DataError: under `MIN_CORPUS_BYTES` in all, or when no document can be held out.
    """
    ordered = sorted(documents, key=lambda document: document.name)
    held_out_hashes = split(ordered)
    entries = []
    sides: dict[bool, list[bytes]] = {False: [], True: []}
    for document in ordered:
        digest = document.sha256
        held_out = digest in held_out_hashes
        entries.append(ManifestEntry(document.name, len(document.content), digest, held_out))
        sides[held_out].append(document.content)
    return Corpus(
        name=name,
        train=np.frombuffer(b"".join(sides[False]), dtype=np.uint8),
        held_out=np.frombuffer(b"".join(sides[True]), dtype=np.uint8),
        manifest=tuple(entries),
        manifest_digest=_digest(entries),
    )


def split(documents: Sequence[Document]) -> frozenset[str]:
    """Content hashes (hex SHA-256) of the documents to hold out, about `HELD_OUT_SHARE` of bytes.

    Documents are taken in the order of their content's hash until the share is reached, so the
    choice is arbitrary but the same everywhere, and equal contents, having one hash, are always on
    one side. A document that would take the held-out part past twice its share is passed over,
    else a single big file could be half of it.

    Raises:
        DataError: under `MIN_CORPUS_BYTES` in all, or when no document can be held out.
    """
    size_of: dict[str, int] = {}
    for document in documents:
        digest = document.sha256
        size_of[digest] = size_of.get(digest, 0) + len(document.content)
    total_bytes = sum(size_of.values())
    if total_bytes < MIN_CORPUS_BYTES:
        raise DataError(
            f"the text is too small to give a held-out part: {total_bytes} bytes, "
            f"need at least {MIN_CORPUS_BYTES}"
        )
    share_bytes = HELD_OUT_SHARE * total_bytes
    chosen: set[str] = set()
    held_out_bytes = 0
    for digest in sorted(size_of):
        if held_out_bytes >= share_bytes:
            break
        if size_of[digest] and held_out_bytes + size_of[digest] <= 2 * share_bytes:
            chosen.add(digest)
            held_out_bytes += size_of[digest]
    if not chosen:
        raise DataError(
            "the text has no part small enough to hold out; most of it is the same few pieces "
            "repeated"
        )
    return frozenset(chosen)


def _digest(entries: Sequence[ManifestEntry]) -> str:
    lines = (
        f"{entry.sha256} {entry.size_bytes} {'held-out' if entry.held_out else 'train'} "
        f"{entry.name}\n"
        for entry in entries
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()
