"""Real servers on free ports, and links to them, over the fake outer server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from services.client import GrpcLink
from services.outer.server import OuterServices
from services.settings import ClientSettings, ServerSettings
from tests.services.fake import FakeOuter
from tests.services.proxy import CutProxy

LOCAL = "127.0.0.1:0"
QUICK = ClientSettings(call_s=5.0, tries=4, retry_wait_s=0.05, retry_wait_max_s=0.5)


@dataclass
class Site:
    """One served outer server; everything made through it is closed with it."""

    outer: FakeOuter
    services: OuterServices
    stack: ExitStack

    @property
    def address(self) -> str:
        return str(self.services.address)

    @property
    def bulk_address(self) -> str:
        return f"127.0.0.1:{self.services.ports.bulk}"

    def link(self, settings: ClientSettings = QUICK, **caps: float) -> GrpcLink:
        link = GrpcLink(self.address, settings=settings, **caps)
        self.stack.callback(link.close)
        return link


Serve = Callable[..., Site]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a `FakeOuter`; keyword arguments are server settings."""
    with ExitStack() as stack:

        def start(outer: FakeOuter | None = None, **changes: object) -> Site:
            outer = outer or FakeOuter()
            values = {"address": LOCAL, "bulk_port": 0, "pulse_s": 0.05, **changes}
            services = OuterServices(outer, ServerSettings.model_validate(values))
            stack.callback(services.stop, 0.2)
            services.start()
            return Site(outer, services, stack)

        yield start


@pytest.fixture
def site(serve: Serve) -> Site:
    return serve()


@pytest.fixture
def cut_bulk(serve: Serve) -> Callable[..., tuple[Site, CutProxy]]:
    """A site whose bulk port is told to be that of a relay that cuts."""

    def start(*, up: bool, cut_after: int | None, **changes: object) -> tuple[Site, CutProxy]:
        proxy = CutProxy(up=up, cut_after=cut_after)
        site = serve(advertise_port=proxy.port, **changes)
        site.stack.callback(proxy.close)
        proxy.target_port = site.services.ports.bulk
        return site, proxy

    return start
