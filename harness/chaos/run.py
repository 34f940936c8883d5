"""A whole chaos run: the run, what befalls it, and the judgement."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.chaos.figures import Span, away, counted, length, uptime
from harness.chaos.judgement import Judgement, referee_words
from harness.chaos.ledger import read_receipts
from harness.chaos.plan import KEEP_ALL, ChaosPlan
from harness.chaos.points import Trap
from harness.chaos.result import LOSS_BOUND, PAUSE_BOUND, Away, ChaosResult, Spread
from harness.chaos.schedule import FaultKind
from harness.chaos.steps import Steps, stamped
from harness.chaos.storm import Storm
from harness.cluster import Cluster
from harness.environment import child_environment, command, module
from harness.plan import SERVER, names_of
from harness.processes import Command, EventKind, Supervisor
from harness.watcher import StatusWatcher

_LOOK_S = 0.2
_RESTARTS = 10_000
_START_LIMIT_S = 180.0
REFEREE = "referee"
_SETTLE_LIMIT_S = 120.0
_REFEREE_LIMIT_S = 1800.0
_STOP_S = 60.0
"""A server that is told to stop writes a last snapshot."""

_PORTS = (20_000, 32_000)
"""Below those that Linux gives to outgoing connections: one of these may not be found taken by a
learner that tries to reach the server which is to come back on it.
"""


@dataclass(frozen=True, slots=True)
class Course:
    """How a run went. Times are on the machine's monotonic clock."""

    storm: Storm
    judgement: Judgement
    span: Span
    held: tuple[Span, ...]
    processes: dict[str, tuple[int, ...]]
    """Process ids of each learner, one after another."""
    lives: dict[int, Span]
    """From the start of a learner's process to its end, by process id."""
    offset_s: float
    """From the supervisor's clock to the monotonic one."""


@dataclass(slots=True)
class Chaos:
    """Does what a plan says. Leaves no process behind, however it ends; `stop` ends it early."""

    plan: ChaosPlan
    stop: threading.Event
    tell: Callable[[str], None]

    def run(self) -> ChaosResult:
        """All of it.

        Raises:
            StoppedError: when `stop` was set.
            DilocoError: when a process ended for good that should not, something took too long, or
                the tape cannot be judged.
        """
        undisturbed = None
        if self.plan.compare:
            self.tell("the run without faults, to compare with")
            calm = replace(self.plan, out=self.plan.out / "undisturbed", is_calm=True)
            undisturbed = self._course(calm).judgement
            self.tell(f"its loss is {undisturbed.losses[-1].loss:.4f} {undisturbed.loss_unit}")
        course = self._course(self.plan)
        return summed_up(self.plan, course, undisturbed)

    def _course(self, plan: ChaosPlan) -> Course:
        plan.out.mkdir(parents=True, exist_ok=True)
        places = _Places(plan.out)
        places.stamps.mkdir(exist_ok=True)
        with Supervisor() as processes:
            cluster = self._cluster(plan, places, processes)
            cluster.make_run()
            cluster.start_compiling()
            address = cluster.serve()
            for island in plan.islands:
                cluster.learn(island)
            with StatusWatcher(address, _LOOK_S) as watcher:
                steps, trap = Steps(places.stamps), Trap(places.trap)
                storm = Storm(plan, cluster, watcher, steps, trap, self.tell)
                cluster.until(lambda: self._is_over(storm), plan.wall_limit_s, "the run")
                finished_s = processes.now_s
                self._settle(storm)
            processes.stop([SERVER], _STOP_S)
            judgement = self._judge(cluster, places)
            return _course_of(storm, judgement, finished_s)

    def _cluster(self, plan: ChaosPlan, places: _Places, processes: Supervisor) -> Cluster:
        spec = plan.spec.model_copy(
            update={
                "budget_tokens": plan.budget_tokens,
                "max_learners": plan.learners,
                "program": stamped(plan.spec.program, places.stamps),
            }
        )
        has_traps = plan.faults.point_kills > 0 and not plan.is_calm
        server = module(
            "harness.chaos.server", str(places.trap.absolute()), str(plan.snapshot_rounds)
        )

        def entry(name: str) -> tuple[str, ...]:
            return server if name == SERVER and has_traps else command()

        def flags(name: str) -> tuple[str, ...]:
            if name == SERVER:
                return ("--keep-snapshots", str(KEEP_ALL))
            is_learner = name in names_of(plan.islands)
            return ("--receipts", str(places.receipts(name))) if is_learner else ()

        return Cluster(
            plan.out, spec, plan.data, self.stop, processes, _RESTARTS,
            entry=entry, flags=flags, server_ports=_free_ports(), server_restarts=_RESTARTS,
            start_limit_s=_START_LIMIT_S,
        )  # fmt: skip

    def _is_over(self, storm: Storm) -> bool:
        processes = storm.cluster.processes
        processes_needed = (SERVER, *names_of(storm.plan.islands))
        for name in processes_needed:
            if processes.settled(name) and processes.exit_code(name) != 0:
                processes.require_alive(name)
        return storm.tick()

    def _settle(self, storm: Storm) -> None:
        """Until all learners have ended, and one more look after that."""
        cluster, names = storm.cluster, names_of(storm.plan.islands)
        looks_left = 2

        def is_over() -> bool:
            nonlocal looks_left
            storm.tick()
            if not all(cluster.processes.settled(name) for name in names):
                return False
            looks_left -= storm.samples[-1][0] >= cluster.processes.now_s - _LOOK_S
            return looks_left <= 0

        cluster.until(is_over, _SETTLE_LIMIT_S, "the learners' end")

    def _judge(self, cluster: Cluster, places: _Places) -> Judgement:
        self.tell("the run is over; its tape is run again")
        receipts = [places.receipts(island.name) for island in self.plan.islands]
        words = referee_words(cluster.run_dir, receipts, self.plan.data, places.judgement)
        environ = child_environment(every_core=True)
        log = cluster.log(REFEREE)
        cluster.processes.start(Command(REFEREE, words, log, environ))
        cluster.until(lambda: cluster.processes.settled(REFEREE), _REFEREE_LIMIT_S, "the judgement")
        if cluster.processes.exit_code(REFEREE) != 0:
            cluster.processes.require_alive(REFEREE)
        return Judgement.model_validate_json(places.judgement.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class _Places:
    out: Path

    @property
    def stamps(self) -> Path:
        return self.out / "stamps"

    @property
    def trap(self) -> Path:
        return self.out / "trap.json"

    @property
    def judgement(self) -> Path:
        return self.out / "judgement.json"

    def receipts(self, learner: str) -> Path:
        return self.out / "receipts" / f"{learner}.jsonl"


def _free_ports() -> tuple[int, int]:
    found: list[int] = []
    while len(found) < 2:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found[0], found[1]


def _course_of(storm: Storm, judgement: Judgement, finished_s: float) -> Course:
    processes = storm.cluster.processes
    offset_s = time.monotonic() - processes.now_s
    names = names_of(storm.plan.islands)
    begins = {EventKind.STARTED, EventKind.RESTARTED}
    ends = {EventKind.DIED, EventKind.ENDED, EventKind.STOPPED}
    pids: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    lives: dict[int, Span] = {}
    for event in processes.events:
        at_s = event.at_s + offset_s
        if event.name in pids and event.kind in begins:
            pids[event.name] = (*pids[event.name], event.pid)
            lives[event.pid] = (at_s, float("inf"))
        elif event.name in pids and event.kind in ends:
            lives[event.pid] = (lives[event.pid][0], at_s)
    stamps = [at_s for pid in lives for at_s in storm.steps.times(pid)]
    span = (min(stamps, default=offset_s), finished_s + offset_s)
    held = tuple((a + offset_s, b + offset_s) for a, b in storm.held)
    return Course(storm, judgement, span, held, pids, lives, offset_s)


def summed_up(plan: ChaosPlan, course: Course, undisturbed: Judgement | None) -> ChaosResult:
    """The result of a run, and of that without faults where there was one."""
    storm, judged = course.storm, course.judgement
    wall_s, held_s = length([course.span]), length(course.held)
    learners = storm.status.learners if storm.status is not None else ()
    steps = sum(one.steps for one in learners)
    tokens_per_step = sum(one.tokens for one in learners) / max(1, steps)
    most_steps = plan.learners * (wall_s - held_s) / plan.pace_s
    loss = judged.losses[-1].loss
    loss_undisturbed = undisturbed.losses[-1].loss if undisturbed is not None else None
    gap = None if loss_undisturbed is None else round(loss / loss_undisturbed - 1, 5)
    gone = _away(course)
    strange = _strange_digests(course)
    findings = [*judged.findings, *judged.differences, *strange, *storm.undone]
    if judged.epochs > 1:
        findings.append(f"{judged.epochs - 1} new epochs: a server found something missing")
    if not judged.finished:
        findings.append("the run is not finished by its tape")
    if gone is not None and gone.longest_pause_s > PAUSE_BOUND * gone.seconds:
        findings.append(f"a learner made no step for {gone.longest_pause_s} s without a server")
    if gap is not None and gap > LOSS_BOUND:
        findings.append(f"the loss is {gap:.2%} above that without faults")
    servers = [one for one in storm.absences if one.name == SERVER]
    return ChaosResult(
        seed=plan.seed,
        server_kills=storm.server_kills,
        learner_kills=storm.learner_kills,
        learner_stops=storm.learner_stops,
        kills_by_point=dict(sorted(storm.by_point.items())),
        acknowledged=judged.acknowledged,
        acknowledged_lost=judged.acknowledged_lost,
        applied_twice=judged.applied_twice,
        digest_mismatches=len(judged.differences) + len(strange),
        fates=judged.fates,
        versions=judged.versions,
        events=judged.events,
        starts=judged.starts,
        epochs=judged.epochs,
        leases_lapsed=judged.lapsed,
        recovery_s=Spread.of([a.took_s for a in servers if a.kind is not FaultKind.SERVER_AWAY]),
        learner_recovery_s=Spread.of(
            [a.took_s for a in storm.absences if a.kind is FaultKind.LEARNER_KILL]
        ),
        away=gone,
        goodput=round(judged.tokens_merged / tokens_per_step / most_steps, 4),
        uptime=round(uptime(_counted(course), course.span, course.held), 4),
        tokens_trained=judged.tokens_trained,
        tokens_merged=judged.tokens_merged,
        tokens_per_s=round(judged.tokens_trained / max(1e-9, wall_s - held_s), 1),
        loss_first=judged.losses[0].loss,
        loss=loss,
        loss_unit=judged.loss_unit,
        loss_undisturbed=loss_undisturbed,
        loss_gap=gap,
        wall_s=round(wall_s, 1),
        held_s=round(held_s, 1),
        findings=tuple(findings),
        holds=not findings,
    )


def _strange_digests(course: Course) -> list[str]:
    """Sentences on the server and on learners whose last weights are others than the tape's."""
    status, expected = course.storm.status, course.judgement.weights_digest
    if status is None:
        return ["no status was ever heard"]
    told = {"the server": status.weights_digest}
    told |= {one.name: one.weights_digest for one in status.learners}
    return [
        f"{name} ended with weights {digest[:16]}, the tape with {expected[:16]}"
        for name, digest in told.items()
        if digest != expected
    ]


def _counted(course: Course) -> list[float]:
    """All steps of processes that handed something in later."""
    storm = course.storm
    offset_s = time.monotonic() - time.time()
    last: dict[int, float] = {}
    places = _Places(storm.plan.out)
    for receipt in read_receipts(places.receipts(name) for name in course.processes):
        last[receipt.pid] = max(last.get(receipt.pid, 0.0), receipt.unix_s + offset_s)
    return [at_s for pid in course.lives for at_s in counted(storm.steps.times(pid), last.get(pid))]


def _away(course: Course) -> Away | None:
    """What the learners that were there all the time did in the server's longest absence."""
    spans = [
        (one.began_s + course.offset_s, one.ended_s + course.offset_s)
        for one in course.storm.absences
        if one.kind is FaultKind.SERVER_AWAY
    ]
    if not spans:
        return None
    span = max(spans, key=lambda one: one[1] - one[0])
    there = {
        name: course.storm.steps.times(pid)
        for name, pids in course.processes.items()
        for pid in pids
        if course.lives[pid][1] >= span[1] and _began_before(course, pid, span[0])
    }  # fmt: skip
    return away(there, span)


def _began_before(course: Course, pid: int, at_s: float) -> bool:
    first = course.storm.steps.times(pid)[:1]
    return bool(first) and first[0] < at_s
