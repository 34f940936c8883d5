"""A link has the rate, delay and queue that it was given, and can be cut."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness.link import Link, LinkShape

HOST = "127.0.0.2"


@contextmanager
def _joined(link: Link) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection through the link."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = link.open(server.getsockname())
        with socket.create_connection((HOST, port)) as near:
            far, _ = server.accept()
            with far:
                near.settimeout(20)
                far.settimeout(20)
                yield near, far


def _received(end: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += end.recv(1 << 16)
    return data


def test_bytes_arrive_as_they_were_sent_both_ways_until_the_end() -> None:
    with Link(HOST, LinkShape(delay_s=0.001)) as link, _joined(link) as (near, far):
        near.sendall(b"up" * 50_000)
        assert _received(far, 100_000) == b"up" * 50_000
        near.shutdown(socket.SHUT_WR)
        assert far.recv(1) == b""
        far.sendall(b"down")
        assert _received(near, 4) == b"down"
        assert link.carried_bytes == (100_000, 4)


def test_the_delay_is_one_way() -> None:
    with Link(HOST, LinkShape(delay_s=0.1)) as link, _joined(link) as (near, far):
        began_s = time.monotonic()
        near.sendall(b"x")
        _received(far, 1)
        far.sendall(b"x")
        _received(near, 1)
        assert time.monotonic() - began_s >= 0.2


def test_two_connections_share_the_rate() -> None:
    """A megabyte at 20 Mbit/s takes 0.4 s, whoever sends it, and no less."""
    shape = LinkShape(rate_mbit=20)
    with Link(HOST, shape) as link, _joined(link) as one, _joined(link) as two:
        began_s = time.monotonic()
        senders = [
            threading.Thread(target=near.sendall, args=(bytes(500_000),)) for near, _ in (one, two)
        ]
        for sender in senders:
            sender.start()
        for _, far in (one, two):
            _received(far, 500_000)
        assert time.monotonic() - began_s >= 0.38
        for sender in senders:
            sender.join()


def test_a_small_message_waits_behind_what_is_queued() -> None:
    """First come, first served: 50 KB at 1 Mbit/s are 0.4 s."""
    shape = LinkShape(rate_mbit=1)
    with Link(HOST, shape) as link, _joined(link) as one, _joined(link) as two:
        began_s = time.monotonic()
        one[0].sendall(bytes(50_000))
        while link.carried_bytes[0] < 50_000:
            assert time.monotonic() - began_s < 20
        two[0].sendall(b"x")
        _received(two[1], 1)
        assert time.monotonic() - began_s >= 0.39


def test_a_sender_without_answers_stops_at_its_window() -> None:
    shape = LinkShape(delay_s=0.2, window_bytes=100_000)
    with Link(HOST, shape) as link, _joined(link) as (near, far):
        began_s = time.monotonic()
        near.setblocking(False)
        sent = 0
        while sent < 300_000:
            try:
                sent += near.send(bytes(300_000 - sent))
            except BlockingIOError:
                assert time.monotonic() - began_s < 20
        _received(far, 300_000)
        # Two more windows than the first, a round trip each, and the way of the last.
        assert time.monotonic() - began_s >= 2 * 0.4 + 0.2 - 0.05


def test_a_cut_stops_everything_without_a_word_and_ends() -> None:
    with Link(HOST, LinkShape()) as link, _joined(link) as (near, far):
        near.sendall(b"a")
        _received(far, 1)
        link.cut()
        near.sendall(b"b")
        far.settimeout(0.2)
        with pytest.raises(TimeoutError):
            far.recv(1)
        far.settimeout(20)
        link.mend()
        assert far.recv(1) == b"b"


def test_closing_breaks_what_is_open() -> None:
    with Link(HOST, LinkShape()) as link, _joined(link) as (near, far):
        near.sendall(b"a")
        _received(far, 1)
        link.close()
        assert near.recv(1) == b""
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((HOST, near.getpeername()[1]), timeout=5)
