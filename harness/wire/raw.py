"""How fast bytes cross loopback by themselves: plain TCP, and gRPC in messages of a chunk.

The receiving end is a process of its own (`python -m harness.wire.raw KIND`), as in the real path.
It says its port on stdout, answers each transfer with the processor seconds it took there, and ends
when its stdin does.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from fragments.chunks import CHUNK_BYTES
from harness.environment import module
from harness.wire.ceiling import Ceiling, measured
from services.client.channel import open_channel
from services.listen import SERVER_OPTIONS, bind
from services.security import Address

_HOST = "127.0.0.1"
_METHOD = "/raw/Send"
_LIMIT_S = 60.0
"""A transfer that takes longer is given up."""


def tcp(size: int) -> Ceiling:
    """`size` bytes through a TCP connection, a chunk a call."""
    with _receiver("tcp") as port:
        chunk = bytes(CHUNK_BYTES)

        def send() -> float:
            with socket.create_connection((_HOST, port), timeout=_LIMIT_S) as line:
                for _ in range(size // CHUNK_BYTES):
                    line.sendall(chunk)
                line.shutdown(socket.SHUT_WR)
                return float(line.recv(64))

        return measured(send, size // CHUNK_BYTES * CHUNK_BYTES)


def grpc_stream(size: int) -> Ceiling:
    """`size` bytes up a stream of messages of a chunk, without protobuf, as bytes."""
    with _receiver("grpc") as port, open_channel(Address(_HOST, port)) as channel:
        chunk = bytes(CHUNK_BYTES)
        call: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(_METHOD)

        def send() -> float:
            return float(call(iter([chunk] * (size // CHUNK_BYTES)), timeout=_LIMIT_S))

        return measured(send, size // CHUNK_BYTES * CHUNK_BYTES)


@contextmanager
def _receiver(kind: str) -> Iterator[int]:
    """The port of a receiving process, which is gone afterwards."""
    with subprocess.Popen(
        module(__name__, kind), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as receiver:
        if receiver.stdout is None or receiver.stdin is None:
            raise TypeError("both were asked for as pipes")
        try:
            yield int(receiver.stdout.readline())
        finally:
            receiver.stdin.close()


def _receive_tcp() -> int:
    listening = socket.create_server((_HOST, 0))

    def serve() -> None:
        buffer = bytearray(CHUNK_BYTES)
        while True:
            line, _ = listening.accept()
            with line:
                began_s = time.process_time()
                while line.recv_into(buffer):
                    pass
                line.sendall(str(time.process_time() - began_s).encode())

    threading.Thread(target=serve, daemon=True).start()
    port: int = listening.getsockname()[1]
    return port


def _receive_grpc() -> int:
    def serve(chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        began_s = time.process_time()
        for _ in chunks:
            pass
        return str(time.process_time() - began_s).encode()

    server = grpc.server(ThreadPoolExecutor(1), options=SERVER_OPTIONS)
    service, _, method = _METHOD.lstrip("/").partition("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(serve)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = bind(server, Address(_HOST, 0))
    server.start()
    _KEPT.append(server)
    return port


_KEPT: list[grpc.Server] = []
"""A server ends with the last that holds it."""

_KINDS: dict[str, Callable[[], int]] = {"tcp": _receive_tcp, "grpc": _receive_grpc}


if __name__ == "__main__":
    print(_KINDS[sys.argv[1]](), flush=True)  # noqa: T201  the sender reads the port here
    sys.stdin.read()
