"""The services fit the rooms that they join: checked by types, and by what a caller meets."""

from __future__ import annotations

from learner.ports import ControlLine, Link
from outer_server.server import OuterServer
from services.client import GrpcLink
from services.client.line import GrpcControlLine
from services.outer.port import OuterPort
from tests.services.fake import FakeOuter


def link(link: GrpcLink) -> Link:
    return link


def line(line: GrpcControlLine) -> ControlLine:
    return line


def server(server: OuterServer) -> OuterPort:
    return server


def fake(fake: FakeOuter) -> OuterPort:
    return fake


def test_every_call_of_a_port_is_there() -> None:
    """The functions above are what the type checker checks; this holds without it."""
    pairs = ((Link, GrpcLink), (ControlLine, GrpcControlLine), (OuterPort, OuterServer))
    for port, room in pairs:
        names = {name for name in vars(port) if not name.startswith("_")}
        assert names <= set(dir(room)), port
