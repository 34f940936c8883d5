"""A user's own text: what is accepted, how it is split, and what an error points at."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fragments.errors import DataError
from learner.reference.userdata import PART_BYTES, user_corpus


def lines(count: int, salt: str = "") -> str:
    return "".join(f"line {index} of the text {salt}, ünïcode\n" for index in range(count))


def test_a_single_file_is_split_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(lines(200_000), encoding="utf-8")
    corpus = user_corpus(str(path))
    assert len(corpus.train) + len(corpus.held_out) == path.stat().st_size
    assert corpus.train[-1] == corpus.held_out[-1] == ord("\n")
    assert max(entry.size_bytes for entry in corpus.manifest) <= PART_BYTES
    train = set(corpus.train.tobytes().splitlines())
    held_out = set(corpus.held_out.tobytes().splitlines())
    assert train | held_out == set(path.read_bytes().splitlines())
    assert not train & held_out


def test_a_small_file_and_one_without_line_ends_still_split(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text(lines(600), encoding="utf-8")
    (tmp_path / "flat.txt").write_bytes(bytes(i * i // 7 % 90 + 33 for i in range(50_000)))
    for name in ("small.txt", "flat.txt"):
        corpus = user_corpus(str(tmp_path / name))
        total = len(corpus.train) + len(corpus.held_out)
        assert 0.05 <= len(corpus.held_out) / total <= 0.10


def test_many_files_are_split_whole(tmp_path: Path) -> None:
    for index in range(40):
        path = tmp_path / f"part{index % 3}" / f"{index:02d}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(lines(50, str(index)), encoding="utf-8")
    corpus = user_corpus(str(tmp_path))
    assert [entry.name for entry in corpus.manifest] == sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")
    )


def test_a_glob_and_a_directory_read_the_same(tmp_path: Path) -> None:
    for index in range(30):
        (tmp_path / f"{index:02d}.txt").write_text(lines(50, str(index)), encoding="utf-8")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    whole = user_corpus(str(tmp_path))
    assert user_corpus(str(tmp_path / "*.txt")).manifest_digest == whole.manifest_digest
    assert user_corpus(str(tmp_path / "**")).manifest_digest == whole.manifest_digest


def test_where_the_files_lie_does_not_matter(tmp_path: Path) -> None:
    digests = set()
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text(lines(2000), encoding="utf-8")
        digests.add(user_corpus(str(tmp_path / place / "a.txt")).manifest_digest)
    assert len(digests) == 1


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson"])
def test_json_lines_are_documents(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"texts.{suffix}"
    texts = [f"document {index} " * 80 for index in range(60)]
    path.write_text("\n".join(json.dumps({"id": 1, "text": text}) for text in texts) + "\n\n")
    corpus = user_corpus(str(path))
    assert len(corpus.manifest) == 60
    assert corpus.manifest[0].name == f"texts.{suffix}:000000001"
    read = np.concatenate([corpus.train, corpus.held_out]).tobytes().decode().splitlines()
    assert sorted(read) == sorted(texts)


def test_json_line_separators_inside_a_text_do_not_shift_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a\u2028b"}\n{"text": 3}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"texts\.jsonl:2: "):
        user_corpus(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "fine"}\n{"body": "x"}\n', r'texts\.jsonl:2: no "text" field holding a string'),
        ('{"text": "fine"}\n\n{"text": 7}\n', r'texts\.jsonl:3: no "text" field holding a string'),
        ('["text"]\n', r"texts\.jsonl:1: no "),
        ('{"text": "fine"}\n{"text": \n', r"texts\.jsonl:2: not JSON: "),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        user_corpus(str(path))


def test_a_file_that_is_not_utf8_is_named_with_the_offset(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text(lines(1000), encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8 at byte 3 \(value 0xe9\)"):
        user_corpus(str(tmp_path / "*.txt"))


@pytest.mark.parametrize("name", ["missing.txt", "*.md", "empty"])
def test_nothing_to_read_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no file matches"):
        user_corpus(str(tmp_path / name))


def test_too_little_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a haiku is not enough\n")
    with pytest.raises(DataError, match="too small"):
        user_corpus(str(tmp_path / "short.txt"))
