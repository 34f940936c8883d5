"""Data-parallel training of two processes is training of one on both batches."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fragments.runspec import RunSpec
from harness.cluster import Look
from harness.dataparallel.exchange import from_wire, padded, to_wire
from harness.dataparallel.job import DataParallelJob
from harness.processes import Supervisor
from harness.programs import load_program
from harness.sites import Sites
from learner.program import Shard
from tests.support.sites import require_sites

STEPS = 6
SITES = ("one", "two", "three")


def _spec() -> RunSpec:
    settings = {"width": 16, "depth": 1, "heads": 2, "seq_len": 16, "batch_size": 4}
    return RunSpec.model_validate(
        {"budget_tokens": 3 * 64 * STEPS, "program": {"settings": settings}}
    )


@pytest.fixture
def data(tmp_path: Path) -> str:
    text = "".join(f"line {number}: {number * number}\n" for number in range(4000))
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("num_values", "processes"), [(1, 2), (7, 3), (200_000, 2), (131_072, 1)])
def test_a_gradient_divides_into_whole_pieces_and_comes_back(
    num_values: int, processes: int
) -> None:
    values = np.random.default_rng(0).normal(size=num_values).astype(np.float32)
    bits = to_wire(jnp.asarray(values), processes)
    assert bits.dtype == jnp.uint16
    assert bits.size == padded(num_values, processes)
    assert bits.size % processes == 0
    back = np.asarray(from_wire(bits, num_values))
    np.testing.assert_allclose(back, values, rtol=2**-8)


@pytest.mark.timeout(110)
def test_three_processes_train_as_one_does_on_all_their_batches(tmp_path: Path, data: str) -> None:
    require_sites()
    spec = _spec()
    job = DataParallelJob(tmp_path / "job", spec, SITES, steps=STEPS, data=data)
    with Sites(SITES) as sites, Supervisor() as processes:
        job.start(processes, sites)
        look = Look(processes, threading.Event(), job.out / "logs")
        look.until(lambda: all(processes.settled(name) for name in job.names), 90, "the job")
        for name in job.names:
            assert processes.exit_code(name) == 0, (job.out / "logs" / f"{name}.log").read_text()
        carried = [sites.carried_bytes(name)[0] for name in SITES]
    reports = job.reports()
    assert len({report.digest for report in reports}) == 1

    losses = np.mean([report.losses for report in reports], axis=0)
    np.testing.assert_allclose(losses, _alone(spec, data), rtol=2e-3)
    assert losses[-1] < losses[0]
    # A ring with two bytes a value, and little more than that.
    least = STEPS * 2 * (len(SITES) - 1) / len(SITES) * 2 * reports[0].parameters
    assert all(least <= sent < 2 * least for sent in carried)


def _alone(spec: RunSpec, data: str) -> list[float]:
    """Losses of one process that trains on all batches together, in float32."""
    program = load_program(spec, data)
    params = program.init_params(spec.seed)
    inner, losses = program.init_inner(params), []
    for number in range(STEPS):
        shards = [Shard(index, len(SITES)) for index in range(len(SITES))]
        batch = np.concatenate([program.batch(shard, number) for shard in shards])
        progress = jnp.float32(number * len(SITES) * program.tokens_per_step / spec.budget_tokens)
        params, inner, loss = program.step(params, inner, batch, progress)
        losses.append(float(jax.device_get(loss)))
    return losses
