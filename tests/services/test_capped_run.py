"""A whole run over gRPC in which one link is full: it trains, says so, and loses nobody."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

from fragments.records import LearnerState, LearnerStatus, Phase, RunStatus
from fragments.tree import TreeCodec
from learner.member import layout_of
from learner.program import StepResult
from learner.run import Learner, Outcome
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from services.client import GrpcLink, fetch_status
from services.outer.server import OuterServices
from services.settings import ServerSettings
from tests.support.tiny import TinyProgram, tiny_spec

CAP = 0.1
LEASE_S = 1.5
WIDE = 100_000
"""Values that move at random: a push of theirs takes about two seconds at the cap."""


class WideProgram(TinyProgram):
    """The tiny program beside a tensor that makes its pushes large."""

    def init_params(self, seed: int) -> Any:
        return {**super().init_params(seed), "wide": jnp.zeros(WIDE, jnp.float32)}

    def step(self, params: Any, inner: Any, batch: Any, progress: jax.Array) -> StepResult:
        small = {name: params[name] for name in ("w", "b")}
        result = super().step(small, inner, batch, progress)
        noise = np.random.default_rng(crc32(batch[0].tobytes())).normal(size=WIDE)
        wide = params["wide"] + jnp.asarray(noise, jnp.float32)
        return StepResult({**result.params, "wide": wide}, result.inner, result.loss)


def _learn(address: str, name: str, cap_up_mbit: float | None) -> Outcome:
    link = GrpcLink(address, cap_up_mbit=cap_up_mbit)
    try:
        learner = Learner(name, WideProgram(), link, link.describe(), pace_s=0.02)
        return learner.run(threading.Event())
    finally:
        link.close()


def _watched_run(directory: Path) -> tuple[list[RunStatus], RunStatus, list[Outcome]]:
    """All looks at a run of two learners, the last one after its end, and how they ended."""
    spec = tiny_spec(
        min_learners=2,
        quorum=1,
        lease_ttl_s=LEASE_S,
        sync_interval=16,
        codec={"block": 256},
        budget_tokens=2 * 16 * 240,
        closing_lap_s=20.0,
    )
    program = WideProgram()
    params = program.init_params(spec.seed)
    layout = layout_of(program, params, spec)
    codec = TreeCodec(layout, params)
    values = [np.asarray(codec.pack(p, params)) for p in range(len(layout.fragments))]
    create_run(directory, spec, layout, values)
    looks: list[RunStatus] = []
    with OuterServer(directory) as server, ThreadPoolExecutor(2) as pool:
        services = OuterServices(server, ServerSettings(address="127.0.0.1:0", bulk_port=0))
        services.start()
        try:
            address, over = str(services.address), threading.Event()
            ends = [
                pool.submit(_learn, address, "full", CAP),
                pool.submit(_learn, address, "free", None),
            ]
            for end in ends:
                end.add_done_callback(lambda _: over.set())
            while not over.wait(0.1):
                looks.append(fetch_status(address))
            outcomes = [end.result(60) for end in ends]
            return looks, fetch_status(address), outcomes
        finally:
            services.stop()


def test_a_link_full_of_bulk_delays_no_heartbeat_and_loses_no_learner(tmp_path: Path) -> None:
    """A push that takes longer than a lease, and one behind the other: leases hold all the same,
    and the status says which link is outrun.
    """
    looks, last, outcomes = _watched_run(tmp_path / "run")
    training = [look for look in looks if look.phase is Phase.TRAINING]

    def seen(name: str) -> list[LearnerStatus]:
        return [one for look in training for one in look.learners if one.name == name]

    full, free = seen("full"), seen("free")
    assert all(one.state is not LearnerState.LOST for one in full + free)
    assert max(one.silent_s for one in full) < LEASE_S
    assert {one.joins for one in last.learners} == {1}
    assert last.phase is Phase.FINISHED
    assert all(outcome.finished for outcome in outcomes)
    assert {one.weights_digest for one in last.learners} == {last.weights_digest}

    late = full[len(full) // 2 :]
    assert all(one.outruns and one.cap_up_mbit == CAP for one in late)
    assert 0.4 * CAP < max(one.use_up_mbit for one in late) <= 1.05 * CAP
    assert sum(one.outruns for one in free) < len(free) / 2
    assert {(one.cap_up_mbit, one.cap_down_mbit) for one in free} == {(0.0, 0.0)}
    assert all((one.use_up_mbit, one.outruns) == (0.0, False) for one in last.learners)
