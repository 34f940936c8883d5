"""The factory that `diloco run` is given in tests: a program that trains in milliseconds."""

from __future__ import annotations

from typing import Any

from tests.support.tiny import TinyProgram


class _WithBigram(TinyProgram):
    def bigram_loss(self) -> float:
        """Stands for a baseline that is computed without training."""
        return 1.0


def build(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """The tiny program; `learning_rate` is its only setting."""
    del data, seed
    return _WithBigram(**settings)
