"""A process for the probe to look at: it burns time in one place, and moves bytes in another.

    python -m tests.harness.busy BYTES

Says the two ports of its connection on stdout and ends when stdin does.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import threading


def burn(over: threading.Event) -> None:
    data = bytes(1000)
    while not over.is_set():
        for _ in range(1000):  # Asking whether it is over is no place where time goes.
            data = hashlib.sha256(data).digest() + data[32:]


def main(size: int) -> None:
    over = threading.Event()
    burner = threading.Thread(target=burn, args=(over,), name="burner-7")
    burner.start()
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as sending,
    ):
        receiving, _ = listening.accept()
        with receiving:
            sending.sendall(bytes(size))
            received = 0
            while received < size:
                received += len(receiving.recv(1 << 16))
            ports = {"from": sending.getsockname()[1], "to": listening.getsockname()[1]}
            sys.stdout.write(json.dumps(ports) + "\n")
            sys.stdout.flush()
            sys.stdin.read()
    over.set()
    burner.join()


if __name__ == "__main__":
    main(int(sys.argv[1]))
