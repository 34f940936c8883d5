"""Data-parallel training of two processes is training of one on both batches."""

from __future__ import annotations

import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from fragments.errors import CheckpointError
from fragments.runspec import RunSpec
from harness.cluster import Look
from harness.dataparallel.checkpoint import load, save
from harness.dataparallel.exchange import from_wire, padded, to_wire
from harness.dataparallel.job import DataParallelJob
from harness.dataparallel.worker import Differentiable, Job, WorkerRequest
from harness.processes import Supervisor
from harness.sites import Sites
from learner.program import Shard
from tests.harness.factory import halved
from tests.support.sites import require_sites

STEPS = 6
SITES = ("one", "two", "three")


def _spec() -> RunSpec:
    return RunSpec.model_validate(
        {
            "budget_tokens": 3 * 16 * STEPS,
            "program": {"factory": "tests.harness.factory:halved"},
        }
    )


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
def test_three_processes_train_as_one_does_on_all_their_batches(tmp_path: Path) -> None:
    require_sites()
    spec = _spec()
    job = DataParallelJob(tmp_path / "job", spec, SITES, steps=STEPS)
    with Sites(SITES) as sites, Supervisor() as processes:
        job.start(processes, sites)
        look = Look(processes, threading.Event(), job.out / "logs")
        look.until(lambda: all(processes.settled(name) for name in job.names), 90, "the job")
        for name in job.names:
            assert processes.exit_code(name) == 0, (job.out / "logs" / f"{name}.log").read_text()
    reports = job.reports()
    assert len({report.digest for report in reports}) == 1

    losses = np.mean([report.losses for report in reports], axis=0)
    np.testing.assert_allclose(losses, _alone(spec), rtol=2e-2)
    assert losses[-1] < losses[0]


def _alone(spec: RunSpec) -> list[float]:
    """Losses of one process that trains on all batches together, in float32."""
    program = halved({}, None, 0)
    assert isinstance(program, Differentiable)
    params = program.init_params(spec.seed)
    inner, losses = program.init_inner(params), []
    for number in range(STEPS):
        batches = [program.batch(Shard(index, len(SITES)), number) for index in range(len(SITES))]
        batch = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
        progress = jnp.float32(number / STEPS)
        loss, slope = program.gradient(params, batch)
        params, inner = program.updated(params, inner, slope, progress)
        losses.append(float(loss))
    return losses


def test_a_job_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    def job(name: str, steps: int) -> Job:
        program = halved({}, None, 0)
        assert isinstance(program, Differentiable)
        request = WorkerRequest(
            spec=_spec(),
            index=0,
            processes=1,
            rendezvous="",
            directory=tmp_path / name,
            checkpoint_every_steps=2,
        )
        made = Job(request, program)
        for _ in range(steps):
            made.step()
        made.update()
        return made

    whole = job("whole", 5)
    assert job("broken", 3).number == 3
    again = job("broken", 3)  # the third step is lost, and made again
    assert again.number == whole.number == 5
    assert again.digest() == whole.digest()


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    save(path, 4, {"w": jnp.zeros(3)})
    assert load(path, {"w": jnp.ones(3)})[0] == 4
    with pytest.raises(CheckpointError, match="of another program"):
        load(path, {"w": jnp.zeros(4)})
    path.write_bytes(b"not this")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        load(path, {"w": jnp.zeros(3)})
