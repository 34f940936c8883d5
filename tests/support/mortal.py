"""A learner process that dies at the worst moment: its answer is in, and it has not heard so.

`python -m tests.support.mortal ADDRESS NAME CHECKPOINTS PUSHES`
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from fragments.records import Contribution, Lease, Receipt
from learner.run import CheckpointRule, Learner
from services.client import GrpcLink
from tests.support.tiny import TinyProgram

EXIT_CODE = 9


class MortalLink(GrpcLink):
    """Takes its process with it once it has so many receipts, and there is a checkpoint."""

    def __init__(self, address: str, checkpoints: Path, pushes: int) -> None:
        super().__init__(address)
        self._checkpoints = checkpoints
        self._left = pushes

    def push(self, lease: Lease, contribution: Contribution) -> Receipt:
        receipt = super().push(lease, contribution)
        self._left -= 1
        if self._left <= 0:
            while not list(self._checkpoints.glob("*/manifest.json")):
                time.sleep(0.01)
            os._exit(EXIT_CODE)
        return receipt


def main() -> None:
    address, name, checkpoints, pushes = sys.argv[1:]
    link = MortalLink(address, Path(checkpoints), int(pushes))
    rule = CheckpointRule(Path(checkpoints), every_s=0.05)
    learner = Learner(name, TinyProgram(), link, link.describe(), pace_s=0.02, checkpoints=rule)
    learner.run(threading.Event())


if __name__ == "__main__":
    main()
