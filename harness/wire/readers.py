"""Readers that take a model's weights far slower than it changes, beside what is measured."""

from __future__ import annotations

import threading
from types import TracebackType

from fragments.errors import DilocoError
from fragments.records import PROTOCOL_VERSION, Hello, Role
from harness.wire.probe import connections
from services.client.outer import GrpcLink

READ_MBIT = 0.5
"""What one of them takes: a fragment of 17 MB in four and a half minutes."""

_AGAIN_S = 0.5


class SlowReaders:
    """So many evaluators, each of which pulls one whole fragment after another, exact values, at
    READ_MBIT. A context manager: they read while it lasts.

    A version that is replaced while one of them reads it must be kept for it, and for no longer:
    that is what they are there to show.
    """

    def __init__(self, address: str, count: int, fragments: int) -> None:
        self._fragments = fragments
        self._links = [GrpcLink(address, cap_down_mbit=READ_MBIT) for _ in range(count)]
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(number, link), name=f"reader-{number}")
            for number, link in enumerate(self._links)
        ]

    @property
    def arrived_bytes(self) -> int:
        """That all of them have read so far."""
        return sum(link.arrived_bytes for link in self._links)

    def ports(self, bulk_port: int) -> frozenset[int]:
        """Their ends of the connections to the server's `bulk_port`."""
        if not self._links:
            return frozenset()
        return frozenset(each.local_port for each in connections() if each.peer_port == bulk_port)

    def __enter__(self) -> SlowReaders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join()

    def _read(self, number: int, link: GrpcLink) -> None:
        fragment = number
        while not self._over.is_set():
            try:
                run = link.describe()
                name = f"slow-reader-{number + 1}"
                lease = link.join(
                    Hello(
                        PROTOCOL_VERSION, run.run_id, run.layout_digest, name, Role.EVALUATOR, name
                    )
                ).lease
                while not self._over.is_set():
                    link.pull(lease, fragment % self._fragments, None)
                    fragment += 1
            except DilocoError:  # its lease has lapsed meanwhile, as that of who says nothing does
                self._over.wait(_AGAIN_S)
