"""A user's own text as a corpus: UTF-8 files, or JSON lines with a "text" field.

Files are documents. With few of them, a single one above all, splitting by file would hold out too
much or nothing, so each is cut into parts at line borders and the parts are split instead.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from fragments.errors import DataError
from learner.reference.corpus import Corpus, Document, build_corpus

PART_BYTES = 64 * 1024
"""Size of the parts that a file is cut into when there are few files."""

_FEW_DOCUMENTS = 20
_PARTS_AT_LEAST = 40
_JSON_LINES = frozenset({".jsonl", ".ndjson"})


def user_corpus(data: str) -> Corpus:
    """Reads `data`, a file, a directory (all files below it) or a glob (`**` recurses).

    `*.jsonl` and `*.ndjson` are JSON lines whose "text" is one document each; anything else is one
    document of UTF-8 text. Hidden files are left out of directories and globs.

    Raises:
        DataError: nothing matches; a file is unreadable or not UTF-8 (names file and byte
            offset); a JSON line has no text (names file and line); too little text to split.
    """
    if not data:
        raise DataError("--data is empty: name a file, a directory or a glob")
    paths = _matches(data)
    root = Path(os.path.commonpath([path.parent for path in paths]))
    try:
        documents = [document for path in paths for document in _documents(path, root)]
    except DataError as error:
        if not Path(data).is_dir():
            raise
        raise DataError(
            f"{error} (--data {data} is a directory, so all files below it are read: a glob such"
            f" as '{data.rstrip('/')}/**/*.txt' takes some of them)"
        ) from error
    if len(documents) < _FEW_DOCUMENTS:
        documents = _cut(documents)
    return build_corpus("user-text", documents)


def _matches(data: str) -> list[Path]:
    if Path(data).is_dir():
        candidates = glob.glob("**/*", root_dir=data, recursive=True)
        paths = [Path(data, name) for name in candidates]
    elif Path(data).exists():
        paths = [Path(data)]
    else:
        paths = [Path(name) for name in glob.glob(data, recursive=True)]
    files = sorted(path.absolute() for path in paths if path.is_file())
    if not files and Path(data).is_dir():
        raise DataError(f"no file matches --data {data!r}: it is a directory without visible files")
    if not files:
        raise DataError(f"no file matches --data {data!r}; quote a glob so that it arrives whole")
    return files


def _documents(path: Path, root: Path) -> Iterator[Document]:
    name = path.relative_to(root).as_posix()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {error.start} (value 0x{content[error.start]:02x}); "
            "convert it or leave it out"
        ) from error
    if path.suffix in _JSON_LINES:
        yield from _records(path, name, text)
    else:
        yield Document(name, content)


def _records(path: Path, name: str, text: str) -> Iterator[Document]:
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{line_number}: not JSON: {error.msg}") from error
        field = record.get("text") if isinstance(record, dict) else None
        if not isinstance(field, str):
            raise DataError(f'{path}:{line_number}: no "text" field holding a string')
        # A JSON string may hold a lone surrogate, which no UTF-8 text can.
        content = field.encode("utf-8", errors="replace")
        yield Document(f"{name}:{line_number:09d}", content.rstrip(b"\n") + b"\n")


def _cut(documents: Sequence[Document]) -> list[Document]:
    total_bytes = sum(len(document.content) for document in documents)
    part_bytes = max(1, min(PART_BYTES, total_bytes // _PARTS_AT_LEAST))
    return [
        Document(f"{document.name}#{index:09d}", part)
        for document in documents
        for index, part in enumerate(_parts(document.content, part_bytes))
    ]


def _parts(content: bytes, part_bytes: int) -> Iterator[bytes]:
    """Pieces of at most `part_bytes`, each ending after a line's end where one is in reach."""
    start = 0
    while start < len(content):
        end = start + part_bytes
        if end < len(content):
            line_end = content.rfind(b"\n", start, end) + 1
            end = line_end or end
        yield content[start:end]
        start = end
