"""Carries a schedule out on a run, and notes what happened when. Ends nothing but the run's own.

One thread: `tick` is called ten times a second. A lane is a generator, which goes on at each tick.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial

from fragments.errors import DilocoError
from fragments.records import LearnerState, Phase, RunStatus
from harness.chaos.breaker import Breaker
from harness.chaos.plan import ChaosPlan
from harness.chaos.points import AT_START, Trap
from harness.chaos.schedule import Fault, FaultKind
from harness.chaos.steps import Steps
from harness.cluster import Cluster
from harness.plan import SERVER
from harness.watcher import StatusWatcher
from services.client.status import fetch_status

TRAP_LIMIT_S = 120.0
"""Longest wait for a server to come by the point at which it is to kill itself."""

RECOVERY_S = 4.0
"""How long a server takes to come back, before it was seen to. An early kill comes within that."""

ANSWER_S = 2.0

Lane = Generator[None, None, None]


@dataclass(frozen=True, slots=True)
class Absence:
    """A process was not there from `began_s` to `ended_s`, on the supervisor's clock."""

    name: str
    kind: FaultKind
    began_s: float
    ended_s: float

    @property
    def took_s(self) -> float:
        """Its length."""
        return self.ended_s - self.began_s


@dataclass(slots=True)
class Storm:
    """What befalls a run. `began_s`: when all learners had made a step, for which each waits.
    `held`: when training was held, because faults took longer than their stretch of the budget.
    """

    plan: ChaosPlan
    cluster: Cluster
    watcher: StatusWatcher
    steps: Steps
    trap: Trap
    breaker: Breaker
    tell: Callable[[str], None]
    status: RunStatus | None = None
    began_s: float | None = None
    server_kills: int = 0
    learner_kills: int = 0
    learner_stops: int = 0
    by_point: Counter[str] = field(default_factory=Counter)
    absences: list[Absence] = field(default_factory=list)
    held: list[tuple[float, float]] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    samples: list[tuple[float, RunStatus]] = field(default_factory=list)
    _free: int = 0
    _stands_still: bool = False
    _held_since_s: float | None = None
    _known: tuple[int, int] = (0, 0)
    _ends: dict[int, float] = field(default_factory=dict)
    _lanes: dict[int, Lane] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schedule = self.plan.schedule
        for number, lane in enumerate((schedule.server, schedule.learners)):
            if lane:
                self._ends[number] = lane[0].end
                self._lanes[number] = self._lane(number, lane)

    @property
    def finished(self) -> bool:
        """The run is, as far as was heard."""
        return self.status is not None and self.status.phase is Phase.FINISHED

    def tick(self) -> bool:
        """Do what is due; whether the run is finished."""
        fresh = self.watcher.take()
        if fresh is not None:
            self.status = fresh
            self.samples.append((self._now_s, fresh))
            self._known = (fresh.tokens_trained, self.steps.total())
        if self.began_s is None:
            self._begin()
            return self.finished
        for number, lane in list(self._lanes.items()):
            if next(lane, self) is self:
                del self._lanes[number], self._ends[number]
        self._hold()
        if self.finished:
            self._end()
        else:
            self.breaker.tick(self._now_s - self.began_s, self._tokens)
        return self.finished

    def _begin(self) -> None:
        """Together: who was started first waits for the others after a step."""
        pids = self._learner_pids()
        ready = {pid for pid in pids.values() if self.steps.count(pid)}
        if len(ready) == len(self.plan.islands):
            self.began_s, ready = self._now_s, set()
        self.steps.hold(ready)

    def _end(self) -> None:
        if self.began_s is not None:
            self.breaker.finish(self._now_s - self.began_s)
        # Who returns now finds a finished run.
        self.steps.hold_back(set(), set())
        if self._lanes:
            left = f"{len(self._lanes)} lanes of faults were not done when the budget was trained"
            self.undone.append(left)
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        self._ends.clear()

    @property
    def _now_s(self) -> float:
        return self.cluster.processes.now_s

    @property
    def _share(self) -> float:
        """Of the budget that is trained."""
        return self._tokens / self.status.tokens_budget if self.status is not None else 0.0

    @property
    def _tokens(self) -> float:
        """Trained; estimated by the stamps while no server says it."""
        status = self.status
        if status is None:
            return 0.0
        steps = sum(one.steps for one in status.learners)
        each = sum(one.tokens for one in status.learners) / steps if steps else 0.0
        tokens, then = self._known
        return tokens + each * (self.steps.total() - then)

    def _hold(self) -> None:
        """No training beyond the stretches whose faults are not over."""
        held = bool(self._ends) and not self._free and self._share >= min(self._ends.values())
        pids = {pid for pid in self._learner_pids().values() if held and self.steps.count(pid)}
        self.steps.hold(pids)
        if held and self._held_since_s is None:
            self._held_since_s = self._now_s
        if not held and self._held_since_s is not None:
            self.held.append((self._held_since_s, self._now_s))
            self._held_since_s = None

    def _learner_pids(self) -> dict[str, int]:
        names = {island.name for island in self.plan.islands}
        return {n: pid for n, pid in self.cluster.processes.pids().items() if n in names}

    def _is_reached(self, share: float) -> bool:
        """Whether so much of the budget is trained, and no learner stands still."""
        return self._share >= share and not self._stands_still

    def _lane(self, number: int, faults: tuple[Fault, ...]) -> Lane:
        for index, fault in enumerate(faults):
            self._ends[number] = fault.end
            if not fault.early:
                yield from self._until(partial(self._is_reached, fault.at))
            following = faults[index + 1] if index + 1 < len(faults) else None
            yield from self._carry_out(fault, following)

    def _carry_out(self, fault: Fault, following: Fault | None) -> Lane:
        match fault.kind:
            case FaultKind.SERVER_KILL:
                yield from self._kill_server(fault.kind, 0.0, following)
            case FaultKind.SERVER_AWAY:
                yield from self._kill_server(fault.kind, self.plan.faults.server_away_s, None)
            case FaultKind.SERVER_POINT:
                yield from self._spring(fault)
            case FaultKind.LEARNER_KILL:
                yield from self._kill_learner(fault)
            case FaultKind.LEARNER_STOP:
                yield from self._stop_learner(fault)

    def _kill_server(self, kind: FaultKind, away_s: float, following: Fault | None) -> Lane:
        processes = self.cluster.processes
        yield from self._until(lambda: processes.running(SERVER))
        dead = processes.pids()[SERVER]
        self.server_kills += 1
        self.tell(f"{self._now_s:.1f} s: {kind} {self.server_kills}")
        began_s = self._now_s
        processes.kill(SERVER, str(kind), away_s)
        back = self._until(lambda: processes.pids().get(SERVER, dead) != dead)
        yield from self._unheld(back) if away_s > 0 else back
        if following is not None and following.early:
            until_s = self._now_s + following.draw * self._recovery_s
            yield from self._until(lambda: self._now_s >= until_s or not processes.running(SERVER))
            return
        yield from self._until_serving(kind, began_s, dead)

    @property
    def _recovery_s(self) -> float:
        """How long the server's last absence was, if it was none on purpose."""
        kills = (FaultKind.SERVER_KILL, FaultKind.SERVER_POINT)
        taken = [one.took_s for one in self.absences if one.kind in kills]
        return taken[-1] if taken else RECOVERY_S

    def _until_serving(self, kind: FaultKind, began_s: float, dead: int) -> Lane:
        yield from self._until(lambda: self._serves(dead))
        self.absences.append(Absence(SERVER, kind, began_s, self._now_s))
        yield

    def _serves(self, dead: int) -> bool:
        """Another server than the dead one answers."""
        if self.cluster.processes.pids().get(SERVER, dead) == dead:
            return False
        host, _, port = self.cluster.address.rpartition(":")
        try:
            # Hardly anything while nobody listens; a channel costs more.
            socket.create_connection((host, int(port)), ANSWER_S).close()
            fetch_status(self.cluster.address, ANSWER_S)
        except (OSError, DilocoError):
            return False
        return True

    def _spring(self, fault: Fault) -> Lane:
        """Have the server kill itself at a point; its next process, where that is passed at the
        start.
        """
        point, processes = fault.point, self.cluster.processes
        if point is None:
            raise ValueError("a kill at a point needs one")
        yield from self._until(lambda: processes.running(SERVER))
        self.trap.set(point, fault.times)
        if point.deed in AT_START:
            dead = processes.pids()[SERVER]
            self.server_kills += 1
            processes.kill(SERVER, f"to start again with a trap {point}")
            yield from self._until(lambda: processes.pids().get(SERVER, dead) != dead)
        dead, limit_s = processes.pids()[SERVER], self._now_s + TRAP_LIMIT_S
        processes.expect_kill(SERVER, str(point))
        # Nothing comes by while training is held.
        yield from self._unheld(self._until(lambda: not self.trap.is_set or self._now_s >= limit_s))
        if self.trap.is_set:
            self.trap.clear()
            self.undone.append(f"the server did not come by {point} {fault.times} times")
            return
        self.server_kills += 1
        self.by_point[str(point)] += 1
        self.tell(f"{self._now_s:.1f} s: {fault.kind} {self.server_kills}, {point}")
        yield from self._until_serving(fault.kind, self._now_s, dead)

    def _kill_learner(self, fault: Fault) -> Lane:
        processes = self.cluster.processes
        name = yield from self._chosen(fault)
        if name is None:
            return
        dead, began_s = processes.pids()[name], self._now_s
        self.learner_kills += 1
        self.tell(f"{began_s:.1f} s: {fault.kind} {self.learner_kills}, {name}")
        processes.kill(name, str(fault.kind))
        yield from self._until(lambda: self._steps_again(name, dead))
        self.absences.append(Absence(name, fault.kind, began_s, self._now_s))

    def _stop_learner(self, fault: Fault) -> Lane:
        processes = self.cluster.processes
        name = yield from self._chosen(fault)
        if name is None:
            return
        yield from self._until(lambda: self._state(name) is LearnerState.TRAINING or self.finished)
        joins, began_s = self._joins(name), self._now_s
        self.learner_stops += 1
        self.tell(f"{began_s:.1f} s: {fault.kind} {self.learner_stops}, {name}")
        processes.pause(name)
        # A lease does not lapse while no server is there, and begins anew with each.
        self._stands_still = True
        try:
            yield from self._until(lambda: self._state(name) is LearnerState.LOST)
        finally:
            self._stands_still = False
            processes.resume(name)
        yield from self._until(lambda: self._joins(name) > joins or processes.settled(name))
        self.absences.append(Absence(name, fault.kind, began_s, self._now_s))

    def _chosen(self, fault: Fault) -> Generator[None, None, str | None]:
        """The learner that a fault befalls, once there is one that trains; None at the end."""
        while not self.finished:
            training = [n for n, pid in self._learner_pids().items() if self.steps.count(pid)]
            if training:
                return sorted(training)[int(fault.draw * len(training))]
            yield
        return None

    def _steps_again(self, name: str, dead: int) -> bool:
        pid = self._learner_pids().get(name, dead)
        return pid != dead and (self.steps.count(pid) > 0 or self.finished)

    def _joins(self, name: str) -> int:
        learners = self.status.learners if self.status is not None else ()
        return next((one.joins for one in learners if one.name == name), 0)

    def _state(self, name: str) -> LearnerState | None:
        learners = self.status.learners if self.status is not None else ()
        return next((one.state for one in learners if one.name == name), None)

    def _unheld(self, lane: Lane) -> Lane:
        """Meanwhile training goes on whatever happens."""
        self._free += 1
        try:
            yield from lane
        finally:
            self._free -= 1

    def _until(self, is_so: Callable[[], bool]) -> Lane:
        while not is_so():
            yield
