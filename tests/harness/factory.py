"""The factory that `diloco run` is given in tests: a program that trains in milliseconds."""

from __future__ import annotations

import os
from typing import Any

from learner.program import Shard
from tests.support.tiny import TinyProgram


class _WithBigram(TinyProgram):
    def bigram_loss(self) -> float:
        """Stands for a baseline that is computed without training."""
        return 1.0


def build(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """The tiny program; `learning_rate` is its only setting."""
    del data, seed
    return _WithBigram(**settings)


class _Ending(TinyProgram):
    def batch(self, shard: Shard, cursor: int) -> Any:
        if cursor >= 4:
            os._exit(7)
        return super().batch(shard, cursor)


def ending(settings: dict[str, Any], data: str | None, seed: int) -> TinyProgram:
    """The tiny program, which takes its process with it at the fifth batch."""
    del data, seed
    return _Ending(**settings)
