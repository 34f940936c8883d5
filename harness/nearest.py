"""What a mistyped word was most likely meant to be."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable


def nearest(unknown: str, known: Iterable[str]) -> str | None:
    """The known word that `unknown` was most likely meant to be, None where nothing is near.

    A word that only drops a prefix (`learning_rate` for `outer.learning_rate`) counts as near.
    What all known words begin with (`--`, `DILOCO_`) counts for nothing.
    """
    words = sorted(set(known))
    folded = unknown.lower().replace("-", "_")
    by_folded = {word.lower().replace("-", "_"): word for word in words}
    # RUF071 wants commonpath, for paths; these are words, compared letter by letter.
    shared = os.path.commonprefix(list(by_folded)).rpartition("_")  # noqa: RUF071  words, no paths
    common = shared[0] + shared[1]
    if len(by_folded) > 1 and folded.startswith(common):
        folded = folded.removeprefix(common)
        by_folded = {word.removeprefix(common): known for word, known in by_folded.items()}
    # A wrong hint is worse than none. 0.72 takes one wrong letter of four, not two of five.
    head, tail = _split(folded)
    alike = {_split(word)[1]: word for word in by_folded if _split(word)[0] == head}
    if head and alike:  # What is right already (`admin` of `admin foo`) makes nothing near.
        close = difflib.get_close_matches(tail, list(alike), n=1, cutoff=0.72)
        return by_folded[alike[close[0]]] if close else None
    close = difflib.get_close_matches(folded, list(by_folded), n=1, cutoff=0.72)
    if close:
        return by_folded[close[0]]
    tails = {word.rpartition(".")[2]: word for word in by_folded}
    close = difflib.get_close_matches(folded.lstrip("_"), list(tails), n=1, cutoff=0.75)
    return by_folded[tails[close[0]]] if close else None


def _split(word: str) -> tuple[str, str]:
    """What comes before the last dot or blank, and after it."""
    head, _, tail = word.replace(" ", ".").rpartition(".")
    return head, tail


def did_you_mean(unknown: str, known: Iterable[str]) -> str:
    """`: did you mean X?`, or nothing where no known word is near."""
    word = nearest(unknown, known)
    return f": did you mean {word}?" if word else ""
