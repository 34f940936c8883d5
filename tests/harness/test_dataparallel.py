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
from harness.dataparallel.exchange import from_wire, to_wire
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


def test_parts_of_a_mean_add_up_to_it_within_the_range_of_gradients() -> None:
    draw = np.random.default_rng(0)
    gradients = draw.normal(size=(3, 1000)) * np.exp2(draw.uniform(-20, 5, size=1000))
    parts = [to_wire(jnp.asarray(one, jnp.float32), 3) for one in gradients]
    assert all(part.dtype == jnp.float16 for part in parts)
    mean = np.asarray(from_wire(parts[0] + parts[1] + parts[2]))
    largest = np.abs(gradients).max(axis=0)
    np.testing.assert_array_less(np.abs(mean - gradients.mean(axis=0)), 2**-10 * largest)


def test_a_sum_of_too_large_parts_stays_finite() -> None:
    parts = [to_wire(jnp.full(1, 1e9, jnp.float32), 2) for _ in range(2)]
    assert float(from_wire(parts[0] + parts[1])[0]) > 200


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
