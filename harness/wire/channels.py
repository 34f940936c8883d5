"""Do several bulk channels carry more than one over a long link? `python -m harness.wire.channels`

Sender, link and receiver are processes of their own; channels and server have the options of the
real ones, and messages are of a chunk. Each round moves the same bytes, spread over one or several
transfers at once, on one or several connections, up and then down. The table has the medians over
the rounds, MB/s.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import NamedTuple

import grpc

from fragments.chunks import CHUNK_BYTES
from harness.environment import module
from services.client.channel import open_channel
from services.listen import SERVER_OPTIONS, bind
from services.security import Address

_SERVER, _NEAR = "127.0.0.1", "127.0.0.4"
_UP, _DOWN = "/raw/Up", "/raw/Down"
_LIMIT_S = 120.0
_ROUNDS = 3
_RATE_MBIT, _DELAY_MS = 1000, 50
_WINDOWS_MIB = (3, 32)
"""Of a TCP connection: what Linux gives it by default (half of a receive buffer of 6 MiB), and more
than the link holds.
"""
_SIZES_MIB = (4, 64)
"""Of a round: a fragment of 16 million parameters, and one of 250 million."""


class _Way(NamedTuple):
    """So many transfers at once, over so many connections."""

    transfers: int
    channels: int


_WAYS = (_Way(1, 1), _Way(2, 1), _Way(4, 1), _Way(2, 2), _Way(4, 4))


def main() -> None:
    """Measures and prints."""
    _say(f"{_RATE_MBIT} Mbit/s, round trip {2 * _DELAY_MS} ms, MB/s (median of {_ROUNDS})\n")
    _say("| TCP window, MiB | MiB | transfers | connections | up | down |")
    _say("|--:|--:|--:|--:|--:|--:|")
    with _child("harness.wire.channels", "serve") as port:
        for window_mib in _WINDOWS_MIB:
            shape = (str(_RATE_MBIT), str(_DELAY_MS), str(window_mib))
            with _child("harness.link", _NEAR, f"{_SERVER}:{port}", *shape) as link_port:
                for mib, way in product(_SIZES_MIB, _WAYS):
                    up, down = _measure(Address(_NEAR, link_port), way, mib)
                    counts = f"{window_mib} | {mib} | {way.transfers} | {way.channels}"
                    _say(f"| {counts} | {up:.1f} | {down:.1f} |")


def _measure(address: Address, way: _Way, mib: int) -> tuple[float, float]:
    """MB/s up and down, of connections that are warm."""
    chunks = mib // way.transfers
    with ExitStack() as stack:
        channels = [stack.enter_context(open_channel(address)) for _ in range(way.channels)]
        lines = [channels[i % way.channels] for i in range(way.transfers)]
        pool = stack.enter_context(ThreadPoolExecutor(way.transfers))

        def rate(move: Callable[[grpc.Channel, int], None]) -> float:
            took_s = []
            for _ in range(1 + _ROUNDS):  # the first one warms the connections up
                began_s = time.monotonic()
                list(pool.map(lambda line: move(line, chunks), lines))
                took_s.append(time.monotonic() - began_s)
            return chunks * way.transfers * CHUNK_BYTES / 1e6 / statistics.median(took_s[1:])

        return rate(_send), rate(_fetch)


def _send(channel: grpc.Channel, chunks: int) -> None:
    call: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(_UP)
    call(iter([bytes(CHUNK_BYTES)] * chunks), timeout=_LIMIT_S)


def _fetch(channel: grpc.Channel, chunks: int) -> None:
    call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(_DOWN)
    for _ in call(str(chunks).encode(), timeout=_LIMIT_S):
        pass


def _serve() -> None:
    """The other end: takes what comes, and sends as many chunks as it is asked for."""

    def up(chunks: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        return str(sum(len(chunk) for chunk in chunks)).encode()

    def down(chunks: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        return iter([bytes(CHUNK_BYTES)] * int(chunks))

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Up": grpc.stream_unary_rpc_method_handler(up),
        "Down": grpc.unary_stream_rpc_method_handler(down),
    }
    server = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
    _say(str(bind(server, Address(_SERVER, 0))))
    server.start()
    sys.stdin.read()


@contextmanager
def _child(name: str, *arguments: str) -> Iterator[int]:
    """The port that a process says; it is gone afterwards."""
    with subprocess.Popen(
        module(name, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        if child.stdout is None or child.stdin is None:
            raise TypeError("both were asked for as pipes")
        try:
            yield int(child.stdout.readline())
        finally:
            child.stdin.close()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve() if sys.argv[1:] == ["serve"] else main()
