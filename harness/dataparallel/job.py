"""A data-parallel job over sites: `jax.distributed` with Gloo, one process at each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fragments.runspec import RunSpec
from harness.dataparallel.checkpoint import saved_number
from harness.dataparallel.worker import CHECKPOINT, WorkerReport, WorkerRequest
from harness.environment import child_environment, module
from harness.gated import Gate
from harness.processes import Command, Supervisor
from harness.warm import use_cache

_PORT = 7788
"""Of the rendezvous, in a network that has nobody else in it."""


class Places(Protocol):
    """Where a job's processes run: `harness.sites.Sites`, or `Here`."""

    def address(self, name: str) -> str:
        """At which the process there is found by the others."""

    def words(self, name: str) -> tuple[str, ...]:
        """What goes before the words of a command so that it runs there."""

    def require_alive(self) -> None:
        """DilocoError when what joins the places has ended."""


class Here:
    """All of them on this machine, as they are."""

    def address(self, name: str) -> str:
        """See `Places`."""
        del name
        return "127.0.0.1"

    def words(self, name: str) -> tuple[str, ...]:
        """See `Places`."""
        del name
        return ()

    def require_alive(self) -> None:
        """See `Places`: nothing joins them that could end."""


@dataclass(frozen=True, slots=True)
class DataParallelJob:
    """What is trained, where, and at which pace.

    `out` gets logs and stamps. `steps` 0: until the job is stopped. All processes have the same
    `spec` and begin from its seed's weights; each trains on a shard of its own.
    """

    out: Path
    spec: RunSpec
    sites: tuple[str, ...]
    pace_s: float = 0.0
    steps: int = 0
    data: str | None = None
    checkpoint_every_steps: int = 0
    """0 for none. A job that is started again in the same `out` goes on from the newest."""

    @property
    def names(self) -> list[str]:
        """The processes' names, in the order of the sites."""
        return [f"worker-{index}" for index in range(len(self.sites))]

    @property
    def directory(self) -> Path:
        """Where stamps and reports are."""
        return (self.out / "workers").absolute()

    @property
    def saved_number(self) -> int:
        """Steps of the checkpoint that the job goes on from when it is started; 0 without one.

        Raises:
            CheckpointError: for one that cannot be read.
        """
        return saved_number(self.directory / CHECKPOINT)

    def start(self, processes: Supervisor, sites: Places, port: int = _PORT) -> None:
        """Starts one process at each site; the supervisor's owner stops them. They meet at `port`
        of the first.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        environ = child_environment()
        # The job's collectives are those of processors, whatever else a machine has.
        environ["JAX_PLATFORMS"] = "cpu"
        use_cache(environ, self.out / "cache")
        rendezvous = f"{sites.address(self.sites[0])}:{port}"
        for index, (name, site) in enumerate(zip(self.names, self.sites, strict=True)):
            request = WorkerRequest(
                spec=self.spec,
                data=self.data,
                index=index,
                processes=len(self.sites),
                rendezvous=rendezvous,
                pace_s=self.pace_s,
                steps=self.steps,
                directory=self.directory,
                checkpoint_every_steps=self.checkpoint_every_steps,
            )
            argv = module("harness.dataparallel.worker", request.model_dump_json())
            log = self.out / "logs" / f"{name}.log"
            processes.start(Command(name, (*sites.words(site), *argv), log, environ))

    def gates(self, processes: Supervisor) -> list[Gate]:
        """The gates of the running processes, whose stamps tell when steps were done."""
        pids = processes.pids()
        return [Gate(self.directory, pids[name]) for name in self.names]

    def reports(self) -> Sequence[WorkerReport]:
        """What the processes left at the end of their steps."""
        return [
            WorkerReport.model_validate_json(
                WorkerReport.path(self.directory, index).read_text(encoding="utf-8")
            )
            for index in range(len(self.sites))
        ]
