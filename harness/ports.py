"""Ports of this machine that nobody has, for processes that must be found there."""

from __future__ import annotations

import random
import socket

_PORTS = (20_000, 32_000)
"""Below those that Linux gives to outgoing connections: one of these may not be found taken by a
process that tries to reach the one which is to come back on it.
"""


def free_ports(count: int) -> list[int]:
    """So many different ones, free on every address a moment ago."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
