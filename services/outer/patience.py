"""Ends a bulk call whose other end has stopped moving: it would hold a thread to its deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc


class Patience:
    """Cancels a call after `idle_s` without `touch`. A context manager around the call's work."""

    def __init__(self, context: grpc.ServicerContext, idle_s: float) -> None:
        self._context = context
        self._idle_s = idle_s
        self._touched_s = time.monotonic()
        self._holding = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)

    def touch(self) -> None:
        """Something has moved."""
        self._touched_s = time.monotonic()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, it is this end that waits: however long, the other end has not stopped."""
        self._holding = True
        try:
            yield
        finally:
            self.touch()
            self._holding = False

    def __enter__(self) -> Patience:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        left_s = self._idle_s
        while left_s > 0 and not self._over.wait(left_s):
            since_s = time.monotonic() if self._holding else self._touched_s
            left_s = since_s + self._idle_s - time.monotonic()
        if not self._over.is_set():
            self._context.cancel()
