"""What a mistyped word was most likely meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(unknown: str, known: Iterable[str]) -> str | None:
    """The known word that `unknown` was most likely meant to be, None where nothing is near.

    A word that only drops a prefix (`learning_rate` for `outer.learning_rate`) counts as near.
    """
    words = sorted(set(known))
    folded = unknown.lower().replace("-", "_")
    by_folded = {word.lower().replace("-", "_"): word for word in words}
    close = difflib.get_close_matches(folded, list(by_folded), n=1, cutoff=0.6)
    if close:
        return by_folded[close[0]]
    tails = {word.rpartition(".")[2]: word for word in by_folded}
    close = difflib.get_close_matches(folded.lstrip("_"), list(tails), n=1, cutoff=0.75)
    return by_folded[tails[close[0]]] if close else None


def did_you_mean(unknown: str, known: Iterable[str]) -> str:
    """`: did you mean X?`, or nothing where no known word is near."""
    word = nearest(unknown, known)
    return f": did you mean {word}?" if word else ""
