"""A link full of bulk in both directions, shaped outside of the processes that use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fragments.records import LearnerState, LearnerStatus
from fragments.runspec import RunSpec
from fragments.tree import TreeCodec
from harness.link import Link, LinkShape
from harness.wire.program import PoolProgram, PoolSettings
from learner.member import layout_of
from learner.run import Learner
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from services.client import GrpcLink
from services.outer.server import OuterServices
from services.settings import ServerSettings

HOST = "127.0.0.3"
NAMES = ("far-1", "far-2")
RATE_MBIT = 10.0
BYTES_S = RATE_MBIT * 1e6 / 8
LEASE_S = 3.0
FRAGMENTS = 8
VALUES = 250_000
"""Of each fragment: in float32 they take most of a second of the link."""

FULL_BYTES = 6_000_000
"""Of bulk each way: about five seconds of the link."""


def _create_run(path: Path) -> PoolProgram:
    """A run whose steps cost nothing and change everything."""
    settings = PoolSettings(tensors=FRAGMENTS, values=VALUES)
    spec = RunSpec.model_validate(
        {
            "run_id": "full",
            "fragments": FRAGMENTS,
            "sync_interval": FRAGMENTS,
            "lease_ttl_s": LEASE_S,
            "codec": {"kind": "f32"},
            "budget_tokens": 10**9,
        }
    )
    program = PoolProgram(settings, spec.seed)
    params = program.init_params(spec.seed)
    layout = layout_of(program, params, spec)
    codec = TreeCodec(layout, params)
    create_run(path, spec, layout, [np.asarray(codec.pack(p, params)) for p in range(FRAGMENTS)])
    return program


def _learn(link: GrpcLink, name: str, program: PoolProgram, stop: threading.Event) -> None:
    Learner(name, program, link, link.describe(), pace_s=0.1).run(stop)


@contextmanager
def _site(server: OuterServer, program: PoolProgram) -> Iterator[tuple[Link, GrpcLink]]:
    """Learners that train at a site with one link to the server, and the line of one of them."""
    stop = threading.Event()
    services = OuterServices(server, ServerSettings(address="127.0.0.1:0", bulk_port=0))
    services.start()
    with Link(HOST, LinkShape()) as link, ThreadPoolExecutor(len(NAMES)) as pool:
        for port in services.ports:
            link.open(("127.0.0.1", port))
        lines = [GrpcLink(f"{HOST}:{services.ports.control}") for _ in NAMES]
        training = [
            pool.submit(_learn, line, name, program, stop)
            for line, name in zip(lines, NAMES, strict=True)
        ]
        try:
            yield link, lines[0]
        finally:
            stop.set()
            for learner in training:
                learner.result(30)
            services.stop()
            for line in lines:
                line.close()


def test_a_heartbeat_comes_through_a_full_link_in_time(tmp_path: Path) -> None:
    """Control queues behind bulk on the link that both share, and learners push and pull without
    pause: round trips grow by what the queue holds, and stay far within the lease.
    """
    program = _create_run(tmp_path / "run")
    looks: list[LearnerStatus] = []
    round_trips_s: list[float] = []
    with OuterServer(tmp_path / "run") as server, _site(server, program) as (link, line):
        give_up_s = time.monotonic() + 90
        # Their first weights come at full speed.
        while sum(learner.steps > 0 for learner in server.status().learners) < len(NAMES):
            assert time.monotonic() < give_up_s
        link.reshape(LinkShape(RATE_MBIT))
        began_s, before = time.monotonic(), link.carried_bytes
        while min(b - a for a, b in zip(before, link.carried_bytes, strict=True)) < FULL_BYTES:
            asked_s = time.monotonic()
            assert asked_s < give_up_s
            line.describe()  # on the connection of the heartbeats
            round_trips_s.append(time.monotonic() - asked_s)
            looks += server.status().learners
        took_s, after = time.monotonic() - began_s, link.carried_bytes
        last = server.status()
    shares = [(b - a) / (BYTES_S * took_s) for a, b in zip(before, after, strict=True)]
    # The link was full: it carried what it could, and a heartbeat had a queue before it.
    assert min(shares) > 0.4
    assert max(round_trips_s) > LinkShape().queue_bytes / BYTES_S
    assert max(round_trips_s) < LEASE_S / 3
    assert max(look.silent_s for look in looks) < 2 * LEASE_S / 3
    assert all(look.state is not LearnerState.LOST for look in looks)
    assert [learner.joins for learner in last.learners] == [1, 1]
