"""Writes a learner's checkpoints from time to time: a thread that the training thread never waits
for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import structlog

from fragments.errors import CheckpointError
from learner.checkpoint import Checkpoints, Writer
from learner.held import Checkpoint, Completed
from learner.program import Inner

STOP_S = 2.0
"""Longest wait at the end for the checkpoint under way; one that takes longer is left unfinished,
and the one before it stays.
"""

_log = structlog.get_logger(__name__)


class Keeper:
    """At most one checkpoint is under way; while it is, no other begins.

    A checkpoint that cannot be written is logged, and tried again when the next one is due:
    training does not end for it.

    Args:
        checkpoints: where they go.
        every_s: shortest time from one checkpoint's beginning to the next's.
        writer: who writes, at present.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        every_s: float,
        writer: Callable[[], Writer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoints = checkpoints
        self._every_s = every_s
        self._writer = writer
        self._clock = clock
        self._due_s = clock() + every_s
        self._is_busy = False
        self._queue: queue.SimpleQueue[Checkpoint | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def completed(self, completed: Completed, inner: Inner) -> None:
        """A step is completed, with the inner state after it: keep it if a checkpoint is due.

        For the training thread; never blocks.
        """
        if self._is_busy or self._clock() < self._due_s:
            return
        self._due_s = self._clock() + self._every_s
        self._is_busy = True
        self._queue.put(Checkpoint(completed, inner))

    def keep(self, last: Checkpoint | None) -> None:
        """Write this one, where there is one, whether it is due or not; never blocks. At a stop it
        has no longer than `stop` waits.
        """
        if last is not None:
            self._queue.put(last)

    def stop(self) -> None:
        """Write what is queued and no more; waits for STOP_S at most. What is not written by then
        is left unfinished when the process ends, and the checkpoint before it stays.
        """
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while (checkpoint := self._queue.get()) is not None:
            self._write(checkpoint)
            # It would keep a whole model and its inner state alive until the next one.
            del checkpoint
            self._is_busy = False

    def _write(self, checkpoint: Checkpoint) -> None:
        began_s = self._clock()
        try:
            path = self._checkpoints.write(self._writer(), checkpoint)
        except CheckpointError as error:
            _log.warning("checkpoint_failed", reason=str(error))
        except Exception:  # noqa: BLE001  a learner without checkpoints is better than none
            _log.exception("checkpoint_failed")
        else:
            seconds = round(self._clock() - began_s, 3)
            _log.info("checkpoint", path=str(path), seconds=seconds)
