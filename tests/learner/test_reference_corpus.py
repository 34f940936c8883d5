"""The corpus: the same everywhere, and never one byte content on both sides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragments.errors import DataError
from learner.reference.corpus import (
    HELD_OUT_SHARE,
    MIN_CORPUS_BYTES,
    Document,
    build_corpus,
    standard_library,
)


def documents(count: int, size_bytes: int = 1000) -> list[Document]:
    return [
        Document(f"{index:04d}.txt", (f"{index} " * size_bytes).encode()[:size_bytes])
        for index in range(count)
    ]


def test_the_standard_library_is_text_without_tests() -> None:
    corpus = standard_library()
    names = [entry.name for entry in corpus.manifest]
    assert 5e6 < len(corpus.train) + len(corpus.held_out) < 30e6
    assert "argparse.py" in names
    assert all(name.endswith(".py") for name in names)
    directories = {part for name in names for part in name.split("/")[:-1]}
    assert not directories & {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def test_the_manifest_accounts_for_every_byte() -> None:
    corpus = standard_library()
    names = [entry.name for entry in corpus.manifest]
    assert names == sorted(names)
    for side, text in ((False, corpus.train), (True, corpus.held_out)):
        assert sum(e.size_bytes for e in corpus.manifest if e.held_out is side) == len(text)
    share = len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out))
    assert HELD_OUT_SHARE <= share <= 2 * HELD_OUT_SHARE


def test_no_content_of_the_standard_library_is_on_both_sides() -> None:
    sides: dict[str, set[bool]] = {}
    for entry in standard_library().manifest:
        sides.setdefault(entry.sha256, set()).add(entry.held_out)
    assert all(len(found) == 1 for found in sides.values())


@settings(max_examples=15)
@given(st.data())
def test_order_of_arrival_changes_nothing(data: st.DataObject) -> None:
    ordered = documents(60)
    shuffled = data.draw(st.permutations(ordered))
    assert build_corpus("c", shuffled).manifest_digest == build_corpus("c", ordered).manifest_digest


@settings(max_examples=30)
@given(st.lists(st.integers(0, 30), min_size=40, max_size=80))
def test_equal_contents_stay_on_one_side(kinds: list[int]) -> None:
    texts = [Document(f"{i:03d}", b"%04d" % kind * 250) for i, kind in enumerate(kinds)]
    filler = documents(40)
    manifest = build_corpus("c", texts + filler).manifest
    sides: dict[str, set[bool]] = {}
    for entry in manifest:
        sides.setdefault(entry.sha256, set()).add(entry.held_out)
    assert all(len(found) == 1 for found in sides.values())
    assert any(entry.held_out for entry in manifest)


def test_a_big_document_is_never_half_of_the_held_out_part() -> None:
    for salt in range(20):
        big = Document("big", (f"{salt} " * 40_000).encode())
        corpus = build_corpus("c", [*documents(200), big])
        assert not next(e.held_out for e in corpus.manifest if e.name == "big")
        assert len(corpus.held_out) >= HELD_OUT_SHARE * (200_000 + len(big.content))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda d: [*d, Document("zzz", b"x")], id="one more"),
        pytest.param(lambda d: [*d[:-1], Document("zzz", d[-1].content)], id="another name"),
        pytest.param(lambda d: [*d[:-1], Document(d[-1].name, b"x")], id="another content"),
    ],
)
def test_the_digest_shows_a_change(change: Callable[[list[Document]], list[Document]]) -> None:
    before = documents(40)
    assert (
        build_corpus("c", before).manifest_digest
        != build_corpus("c", change(before)).manifest_digest
    )


def test_too_little_text_is_refused() -> None:
    with pytest.raises(
        DataError, match=f"too small .* 1000 bytes, need at least {MIN_CORPUS_BYTES}"
    ):
        build_corpus("c", documents(1))


def test_one_text_repeated_cannot_be_split() -> None:
    with pytest.raises(DataError, match="repeated"):
        build_corpus("c", [Document(str(index), b"again\n" * 200) for index in range(50)])
