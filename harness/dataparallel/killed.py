"""A real data-parallel job whose workers are killed by a schedule.

Nobody can go on without the one that was killed, so the job ends with it, and is started again as
a whole, from its checkpoint, when whoever is down is repaired. What a restart takes is set, not
measured: the processes are started at the kill already and held before their first step, so that
the cores of this machine, on which several start more slowly than one, make no difference.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.chaos.outages import Downtime
from harness.cluster import Look
from harness.dataparallel.job import DataParallelJob, Here, Places
from harness.dataparallel.lives import JobResult, Life, job_result, next_step_s
from harness.gated import Gate
from harness.ports import free_ports
from harness.processes import Supervisor

Downtimes = tuple[Downtime, ...]

_START_LIMIT_S = 180.0
"""Until all processes of a start are ready to step."""

_TELL_S = 30.0

_LATE_S = 0.5
"""Who is ready no later than that is not late."""


@dataclass(slots=True)
class KilledJob:
    """One job from its first step on for `span_s` seconds, or until `enough_steps` are kept. No
    process stays behind, however it ends. `downtimes`: in order of time, of learners that are named
    as the job's sites are; `restart_s`: from a repair to the beginning of the next step. Call `run`
    once.
    """

    job: DataParallelJob
    downtimes: Downtimes
    span_s: float
    restart_s: float
    stop: threading.Event
    tell: Callable[[str], None]
    enough_steps: int | None = None
    places: Places = field(default_factory=Here)
    _lives: list[Life] = field(default_factory=list)
    _late_s: list[float] = field(default_factory=list)
    _came: list[Downtime] = field(default_factory=list)
    _gates: list[Gate] = field(default_factory=list)
    _number: int = 0
    _began_s: float = 0.0
    _life_began_s: float = 0.0
    _let_go_s: float | None = None
    _told_s: float = 0.0

    def run(self) -> JobResult:
        """All of it.

        Raises:
            StoppedError: when `stop` was set.
            DilocoError: when a process ended that nobody killed, a link's too, or did not start in
                time.
            CheckpointError: for a checkpoint that cannot be read.
        """
        with Supervisor() as processes:
            look = Look(processes, self.stop, self.job.out / "logs", self.places.require_alive)
            self._start(processes)
            look.until(lambda: self._is_ready(processes), _START_LIMIT_S, "the start of the job")
            self._began_s = time.monotonic()
            self._let_go(0.0)
            look.until(lambda: self._tick(processes), self.span_s + _START_LIMIT_S, "the job")
            self._end(processes, time.monotonic() - self._began_s)
        return job_result(self._lives, len(self._came), self.job.pace_s, self._late_s)

    def _tick(self, processes: Supervisor) -> bool:
        """Do what is due; whether the job is over."""
        now_s = time.monotonic() - self._began_s
        is_enough = self.enough_steps is not None and self._steps() >= self.enough_steps
        if now_s >= self.span_s or is_enough:
            return True
        for name in self.job.names:
            processes.require_alive(name)
        due = [each for each in self.downtimes[len(self._came) :] if each.at_s <= now_s]
        if due:
            self._kill(processes, due, now_s)
        elif self._let_go_s is None and now_s >= self._due_s and self._is_ready(processes):
            self._let_go(now_s)
        if now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            self.tell(f"{now_s:.1f} s: data-parallel has made {self._steps()} steps that are kept")
        return False

    def _kill(self, processes: Supervisor, due: list[Downtime], now_s: float) -> None:
        """With the last of those that are due at once the job is what it is with all of them."""
        for each in due:
            self.tell(f"{now_s:.1f} s: kill of {each.learner} for {each.down_s:g} s")
            name = self.job.names[self.job.sites.index(each.learner)]
            processes.kill(name, "the schedule")
        self._end(processes, now_s)
        self._came += [each._replace(at_s=now_s) for each in due]
        self._start(processes)

    def _start(self, processes: Supervisor) -> None:
        """All processes anew, held before their first step."""
        self._number, self._let_go_s = self.job.saved_number, None
        self.job.start(processes, self.places, free_ports(1)[0])
        self._gates = self.job.gates(processes)
        for gate in self._gates:
            gate.shut()

    def _is_ready(self, processes: Supervisor) -> bool:
        """Whether all could step, were they let."""
        for name in self.job.names:
            processes.require_alive(name)
        return all(gate.has_arrived for gate in self._gates)

    def _let_go(self, now_s: float) -> None:
        late_s = now_s - self._due_s
        is_late = late_s > _LATE_S
        if is_late:
            self._late_s.append(late_s)
        if self._came:
            late = f", {late_s:.1f} s late" if is_late else ""
            self.tell(f"{now_s:.1f} s: the job goes on from step {self._number}{late}")
        for gate in self._gates:
            gate.open()
        self._let_go_s = now_s

    def _end(self, processes: Supervisor, now_s: float) -> None:
        """Of all processes, and of this life of the job."""
        processes.stop(self.job.names, 0.0)
        stamps = (at_s - self._began_s for at_s in self._gates[0].stamps())
        made = tuple(at_s for at_s in stamps if at_s <= now_s)
        repaired_s = next_step_s(self._down(), 0.0)
        self._lives.append(
            Life(self._number, self._life_began_s, repaired_s, self._let_go_s, now_s, made)
        )
        self._life_began_s = now_s

    def _down(self) -> list[tuple[float, float]]:
        return [(each.at_s, each.down_s) for each in self._came]

    @property
    def _due_s(self) -> float:
        """When the next step is to begin."""
        return next_step_s(self._down(), self.restart_s)

    def _steps(self) -> int:
        return self._number + self._gates[0].count()
