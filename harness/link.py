"""A link between two places, in user space: a TCP relay with a rate, a delay, a queue and a cut.

All connections that go through one link share its rate and its queue, first come, first served, so
bulk stands in the way of control as it does on a real link. What is modelled is the link, not TCP:
nothing is lost, and nobody starts slowly.

`python -m harness.link HOST TARGET_HOST:PORT [RATE_MBIT [DELAY_MS [WINDOW_MIB]]]` is one with a
process of its own, which says its port on stdout and ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import sys
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from services.shaper import bytes_s

_PIECE_BYTES = 16 << 10
"""What a connection puts into the queue at once; bigger ones would make others wait longer, and
smaller ones cost more than a fast link has time for."""


@dataclass(frozen=True, slots=True)
class LinkShape:
    """What a link does, each way.

    Args:
        rate_mbit: Mbit/s (10^6 bits) for all connections together.
        delay_s: one way.
        queue_bytes: what may wait for its turn; beyond it, who sends must wait.
        window_bytes: what one connection may have sent and not heard to have arrived, as TCP's
            windows bound it (on Linux by default 3 to 6 MiB).
    """

    rate_mbit: float = math.inf
    delay_s: float = 0.0
    queue_bytes: int = 256 << 10
    window_bytes: int = 6 << 20


CLEAR = LinkShape()
"""A link that does nothing to what it carries."""


class Steered(Protocol):
    """A link whose state may be changed while it carries something, wherever it is."""

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told: what is sent waits for `mend`."""

    def mend(self) -> None:
        """The end of a cut."""

    def reshape(self, shape: LinkShape) -> None:
        """From here on another shape, also for connections that are open."""


class _Direction:
    """One way of a link. When a piece arrives is known as soon as it has a place in the queue."""

    def __init__(self) -> None:
        self.carried_bytes = 0
        self._free_at_s = 0.0

    async def arrival_s(
        self, num_bytes: int, shape: LinkShape, clock: asyncio.AbstractEventLoop
    ) -> float:
        """Waits for a place in the queue; the time at which the piece will be at the other end."""
        rate_bytes_s = bytes_s(shape.rate_mbit)
        queue_s = shape.queue_bytes / rate_bytes_s
        while (ahead_s := self._free_at_s - clock.time()) > queue_s:
            await asyncio.sleep(ahead_s - queue_s)
        self._free_at_s = max(self._free_at_s, clock.time()) + num_bytes / rate_bytes_s
        self.carried_bytes += num_bytes
        return self._free_at_s + shape.delay_s


class Link:
    """A link that is up until closed; a context manager. Thread-safe.

    Args:
        host: the address of this end: what is dialled there comes out at the other end. Links of
            one machine differ in it (127.0.0.2, 127.0.0.3, ...), so that each may have the ports
            of the server behind it.
        shape: may be replaced at any time by `reshape`.
    """

    def __init__(self, host: str, shape: LinkShape) -> None:
        self._host = host
        self._shape = shape
        self._up, self._down = _Direction(), _Direction()
        self._loop = asyncio.new_event_loop()
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._whole = asyncio.Event()
        self._whole.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"link-{host}")
        self._thread.start()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def carried_bytes(self) -> tuple[int, int]:
        """Bytes that entered the link so far, up (from who dialled) and down."""
        return self._up.carried_bytes, self._down.carried_bytes

    def reshape(self, shape: LinkShape) -> None:
        """See `Steered`."""
        self._shape = shape

    def open(self, target: tuple[str, int], port: int | None = None) -> int:
        """Relays connections to `port` of this end (the target's by default; 0 for a free one) to
        `target`. Returns the port. OSError where it is taken.
        """
        listener = socket.create_server((self._host, target[1] if port is None else port))
        listener.setblocking(False)
        self._listeners.append(listener)
        self._loop.call_soon_threadsafe(self._begin, self._accept(listener, target))
        return int(listener.getsockname()[1])

    def carry(self, near: socket.socket, target: tuple[str, int]) -> None:
        """Relays a connection that somebody else has accepted to `target`, and owns it from here
        on.
        """
        self._loop.call_soon_threadsafe(lambda: self._begin(self._connect(near, target)))

    def cut(self) -> None:
        """See `Steered`."""
        self._loop.call_soon_threadsafe(self._whole.clear)

    def mend(self) -> None:
        """See `Steered`."""
        self._loop.call_soon_threadsafe(self._whole.set)

    def close(self) -> None:
        """Breaks all connections. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        for listener in self._listeners:
            listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        while True:
            near, _ = await self._loop.sock_accept(listener)
            self._begin(self._connect(near, target))

    async def _connect(self, near: socket.socket, target: tuple[str, int]) -> None:
        """One connection, to its end."""
        with near, socket.socket() as far:
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._whole.wait()
            try:
                await self._loop.sock_connect(far, target)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._carry(near, far, self._up))
                    both.create_task(self._carry(far, near, self._down))
            except* OSError:
                pass  # one end broke it, and so the other one's breaks here

    async def _carry(
        self, source: socket.socket, sink: socket.socket, direction: _Direction
    ) -> None:
        """Takes from `source` what the link has room for; it arrives at `sink` in its time."""
        way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        window = _Window()
        async with asyncio.TaskGroup() as both:
            both.create_task(self._deliver(way, sink, window))
            while True:
                await window.room(self._shape.window_bytes)
                data = await self._loop.sock_recv(source, _PIECE_BYTES)
                arrival_s = await direction.arrival_s(len(data), self._shape, self._loop)
                window.sent(len(data))
                way.put_nowait((arrival_s, data))
                if not data:
                    return

    async def _deliver(
        self, way: asyncio.Queue[tuple[float, bytes]], sink: socket.socket, window: _Window
    ) -> None:
        while True:
            arrival_s, data = await way.get()
            await asyncio.sleep(arrival_s - self._loop.time())
            await self._whole.wait()
            if not data:
                with contextlib.suppress(OSError):  # the other side was faster
                    sink.shutdown(socket.SHUT_WR)
                return
            await self._loop.sock_sendall(sink, data)
            # The sender hears of it one way later.
            self._loop.call_later(self._shape.delay_s, window.heard, len(data))


class _Window:
    """What one connection has under way."""

    def __init__(self) -> None:
        self._bytes = 0
        self._changed = asyncio.Event()

    async def room(self, most_bytes: int) -> None:
        """Waits until something more may be sent."""
        while self._bytes >= most_bytes:
            self._changed.clear()
            await self._changed.wait()

    def sent(self, num_bytes: int) -> None:
        self._bytes += num_bytes

    def heard(self, num_bytes: int) -> None:
        self._bytes -= num_bytes
        self._changed.set()


def _main(
    host: str, target: str, rate_mbit: str = "inf", delay_ms: str = "0", window_mib: str = "6"
) -> None:
    window_bytes = int(float(window_mib) * (1 << 20))
    shape = LinkShape(float(rate_mbit), float(delay_ms) / 1000, window_bytes=window_bytes)
    target_host, _, port = target.rpartition(":")
    with Link(host, shape) as link:
        print(link.open((target_host, int(port))), flush=True)  # noqa: T201  for who started it
        sys.stdin.read()


if __name__ == "__main__":
    _main(*sys.argv[1:])
