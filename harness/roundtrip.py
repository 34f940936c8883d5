"""The round trip to an address, on stdout in seconds: `python -m harness.roundtrip ADDRESS`.

Nobody need listen there: a connection is asked for at a port where nobody does, and refused.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

TRIES = 5
_PORT = 9
_LIMIT_S = 30.0


def round_trip_s(address: str) -> float:
    """The least of some tries: the first ones ask for the address of the device as well.

    Raises:
        OSError: when no answer came.
    """
    return min(_once_s(address) for _ in range(TRIES))


def _once_s(address: str) -> float:
    began_s = time.monotonic()
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection((address, _PORT), timeout=_LIMIT_S).close()
    return time.monotonic() - began_s


if __name__ == "__main__":
    print(round_trip_s(sys.argv[1]))  # noqa: T201  its output is the answer
