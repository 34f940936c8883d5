"""One process of a data-parallel job: `python -m harness.dataparallel.worker JSON`.

A step is a gradient on this process's shard, as long as the pace says, and then the exchange: no
part of it runs while the gradient is computed. What the mean gradient changes is computed at the
beginning of the next step, within its pace, so that a step takes the pace and the exchange.

It ends with its parent, or when another process of the job is gone: nobody can go on alone.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from fragments.errors import SettingsError
from fragments.runspec import RunSpec
from harness.gated import Gate
from harness.programs import load_program
from learner.program import Batch, Inner, Params, Program, Shard

CHECKPOINT = "checkpoint.safetensors"


class WorkerRequest(BaseModel):
    """What a process of the job is told.

    `directory` gets a stamp for each step, and at the end a `WorkerReport`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: RunSpec
    data: str | None = None
    index: int = Field(ge=0)
    processes: int = Field(ge=1)
    rendezvous: str = Field(description="HOST:PORT at which process 0 listens")
    pace_s: float = Field(default=0.0, ge=0)
    steps: int = Field(default=0, ge=0, description="0: until its parent ends it")
    directory: Path
    checkpoint_every_steps: int = Field(default=0, ge=0, description="0: none is written")

    @property
    def checkpoint(self) -> Path:
        """Where all processes go on from, if it is there."""
        return self.directory / CHECKPOINT


class WorkerReport(BaseModel):
    """What a process of finite steps leaves: its own losses, and its last weights' digest."""

    losses: tuple[float, ...]
    digest: str
    parameters: int

    @staticmethod
    def path(directory: Path, index: int) -> Path:
        """Where the report of the process is."""
        return directory / f"worker-{index}.json"


@runtime_checkable
class Differentiable(Program, Protocol):
    """A program whose step comes in two halves, between which gradients can be exchanged."""

    def gradient(self, params: Params, batch: Batch) -> tuple[Any, Params]:
        """Loss (f32 scalar) and its gradient, a pytree as `params`; to be traced."""
        ...

    def updated(
        self, params: Params, inner: Inner, gradient: Params, progress: Any
    ) -> tuple[Params, Inner]:
        """What a step makes of that gradient; to be traced."""
        ...


def train(request: WorkerRequest) -> None:
    """Trains to the last step; with 0 steps for ever.

    Raises:
        SettingsError: for a program that gives no gradients.
    """
    _meet(request)  # before anything asks jax for its devices
    program = load_program(request.spec, request.data)
    if not isinstance(program, Differentiable):
        raise SettingsError(
            f"program.factory {request.spec.program.factory}: data-parallel training needs"
            " gradient() and updated() beside step()"
        )
    job = Job(request, program)
    gate = Gate(request.directory, os.getpid())
    losses: list[float] = []
    job.warm_up()
    gate.arrive()
    while not request.steps or job.number < request.steps:
        gate.wait()
        loss = job.step()
        gate.stamp()
        if request.steps:
            losses.append(loss)
    job.update()
    report = WorkerReport(losses=tuple(losses), digest=job.digest(), parameters=job.num_values)
    path = WorkerReport.path(request.directory, request.index)
    path.write_text(report.model_dump_json(), encoding="utf-8")


class Job:
    """This process's part of the training; `number` steps are done. It goes on from the job's
    checkpoint, where there is one.
    """

    def __init__(self, request: WorkerRequest, program: Differentiable) -> None:
        import jax
        from jax.flatten_util import ravel_pytree

        from harness.dataparallel.checkpoint import load
        from harness.dataparallel.exchange import from_wire, make_exchange, to_wire

        self._request, self._program = request, program
        params = program.init_params(request.spec.seed)
        fresh = (params, program.init_inner(params))
        self.number, state = load(request.checkpoint, fresh)
        # At a place of its own, as what steps make of it is: else all is compiled twice.
        self._params, self._inner = jax.device_put(state, jax.local_devices()[0])
        self._mean: Any = None
        flat, unravel = ravel_pytree(self._params)
        self.num_values = num_values = int(flat.size)
        processes = request.processes

        def gradient(params: Params, batch: Batch) -> tuple[Any, Any]:
            loss, slope = program.gradient(params, batch)
            return loss, to_wire(ravel_pytree(slope)[0], processes)

        def updated(params: Params, inner: Inner, mean: Any, progress: Any) -> tuple[Params, Inner]:
            slope = unravel(from_wire(mean))
            return program.updated(params, inner, slope, progress)

        self._gradient, self._updated = jax.jit(gradient), jax.jit(updated)
        self._exchange = make_exchange(num_values, processes)

    def warm_up(self) -> None:
        """Compile what steps run, and meet the others in exchanges; nothing of it is kept."""
        import jax
        import jax.numpy as jnp

        shard = Shard(self._request.index, self._request.processes)
        batch, (params, inner) = (
            self._program.batch(shard, self.number),
            (self._params, self._inner),
        )
        # Arrays that a step has made may be compiled for anew, so the second one is made too.
        for _ in range(2):
            _, part = self._gradient(params, batch)
            mean = self._exchange(part)
            params, inner = self._updated(params, inner, mean, jnp.float32(0))
        for leaf in jax.tree.leaves((params, inner)):
            leaf.block_until_ready()

    def step(self) -> float:
        """One step, at the end of which all processes have its mean gradient; this one's loss."""
        request = self._request
        began_s = time.monotonic()
        self.update()
        batch = self._program.batch(Shard(request.index, request.processes), self.number)
        loss, part = self._gradient(self._params, batch)
        part.block_until_ready()
        time.sleep(max(0.0, request.pace_s - (time.monotonic() - began_s)))
        self._mean = self._exchange(part).block_until_ready()
        self.number += 1
        return float(loss)

    def update(self) -> None:
        """Take in the mean gradient of the last step, if that is not done yet; process 0 then
        writes a checkpoint, where one is due.
        """
        import jax.numpy as jnp

        if self._mean is None:
            return
        spec, before = self._request.spec, self.number - 1
        tokens = before * self._program.tokens_per_step * self._request.processes
        progress = jnp.float32(min(1.0, tokens / spec.budget_tokens))
        self._params, self._inner = self._updated(self._params, self._inner, self._mean, progress)
        self._mean = None
        every = self._request.checkpoint_every_steps
        if every and self.number % every == 0 and self._request.index == 0:
            from harness.dataparallel.checkpoint import save

            save(self._request.checkpoint, self.number, (self._params, self._inner))

    def digest(self) -> str:
        """Sha256 (64 hex digits) over the bits of all parameters."""
        import jax
        import numpy as np

        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self._params):
            digest.update(np.asarray(leaf).tobytes())
        return digest.hexdigest()


def _meet(request: WorkerRequest) -> None:
    """Waits for the others."""
    import jax

    jax.config.update(  # type: ignore[no-untyped-call]  # jax gives it no types
        "jax_cpu_collectives_implementation", "gloo"
    )
    jax.distributed.initialize(request.rendezvous, request.processes, request.index)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    train(WorkerRequest.model_validate_json(sys.argv[1]))
