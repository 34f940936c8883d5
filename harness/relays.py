"""The links of a local run: one relay in user space for each learner that is to have one."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from fragments.errors import SettingsError
from harness.link import Link, LinkShape
from services.security import parse_address

_FIRST_HOST = 2
"""Links begin at 127.0.0.2: their ends have the server's ports, and so need other addresses."""


class Relays:
    """A link for each name in `shapes`, each with a loopback address of its own. A context manager.

    Nothing is listened to before `open`.
    """

    def __init__(self, shapes: Mapping[str, LinkShape]) -> None:
        self._shapes = dict(shapes)
        self._links: dict[str, Link] = {}
        self._addresses: dict[str, str] = {}

    def __enter__(self) -> Relays:
        return self

    def __exit__(self, *_exc: object) -> None:
        for link in self._links.values():
            link.close()

    def open(self, address: str, bulk_port: int) -> None:
        """Relays to the server at `address` and its bulk port, over every link.

        Raises:
            SettingsError: where this machine has no such loopback address, or it is in use.
        """
        server = parse_address(address)
        for number, (name, shape) in enumerate(self._shapes.items(), start=_FIRST_HOST):
            host = f"127.0.0.{number}"
            self._links[name] = link = Link(host, shape)
            try:
                for port in (server.port, bulk_port):
                    link.open((server.host, port))
            except OSError as error:
                raise SettingsError(_why_not(host, error)) from error
            self._addresses[name] = f"{host}:{server.port}"

    def dialled(self, name: str, address: str) -> str:
        """What the learner of that name dials: its link, or `address` where it has none."""
        return self._addresses.get(name, address)

    def carried_bytes(self) -> dict[str, tuple[int, int]]:
        """What each link has carried so far, up (from the learner) and down."""
        return {name: link.carried_bytes for name, link in self._links.items()}

    @property
    def links(self) -> Mapping[str, Link]:
        """By name, to cut, mend and reshape them; none before `open`."""
        return self._links


def _why_not(host: str, error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"a link needs the loopback address {host}, which this machine does not have: on macOS"
            f" `sudo ifconfig lo0 alias {host}` adds it"
        )
    return f"a link cannot listen on {host}: {error.strerror or error}"
