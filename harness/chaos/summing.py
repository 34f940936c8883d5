"""From how a chaos run went to what it came to."""

from __future__ import annotations

import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from fragments.records import LearnerState
from harness.chaos.breaker import Befell
from harness.chaos.figures import Span, away, counted, length, uptime
from harness.chaos.judgement import Judgement
from harness.chaos.ledger import read_receipts
from harness.chaos.model import as_one_job, by_papers_rule
from harness.chaos.outages import OutageKind
from harness.chaos.plan import ChaosPlan, Places
from harness.chaos.recovery import by_kind, delays, restarts, signs, spent
from harness.chaos.result import (
    LOSS_BOUND,
    PAUSE_BOUND,
    Away,
    ChaosResult,
    Models,
    Spent,
    Spread,
    Suffered,
)
from harness.chaos.schedule import FaultKind, Faults
from harness.chaos.storm import Storm
from harness.plan import SERVER, names_of
from harness.processes import EventKind

_ASKED_FOR = {True: {-signal.SIGKILL}, False: {-signal.SIGKILL, 3}}
"""Exit codes of a server's and of any other process's death that are no finding: 3 is that of a
learner that was started again while no server was there, which it is until there is one."""


MODELLED_CHECKPOINT_S = 10.0
"""Where learners write none, the jobs of the models write one so often."""


LATE_S = 0.5
"""Who makes its next step no later than that is not late."""


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
    carried_bytes: dict[str, tuple[int, int]]
    """By each learner's link, up and down."""

    @property
    def steps(self) -> dict[str, list[float]]:
        """When each learner made one."""
        times = self.storm.steps.times
        return {n: sorted(t for pid in pids for t in times(pid)) for n, pids in
                self.processes.items()}  # fmt: skip

    @property
    def befell(self) -> list[Befell]:
        """The outages by the clock, on the machine's monotonic clock."""
        begin_s = self.span[0]
        return [
            Befell(each.outage, each.began_s + begin_s, each.ended_s + begin_s)
            for each in self.storm.breaker.befell
        ]


def course_of(
    storm: Storm,
    judgement: Judgement,
    finished_s: float,
    carried_bytes: Mapping[str, tuple[int, int]],
) -> Course:
    """From what was noted; `finished_s`: when that was heard, on the supervisor's clock;
    `carried_bytes`: by each learner's link, up and down.
    """
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
    began_s = storm.began_s if storm.began_s is not None else finished_s
    span = (began_s + offset_s, finished_s + offset_s)
    held = tuple((a + offset_s, b + offset_s) for a, b in storm.held)
    carried = dict(carried_bytes)
    return Course(storm, judgement, span, held, pids, lives, offset_s, carried)


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
    gone, strange = _away(course), _strange_digests(course)
    findings = _findings(course, strange, gone, gap)
    befell, steps_of = course.befell, course.steps
    works = signs(steps_of, [at_s + course.offset_s for at_s, _ in storm.samples])
    goodput = round(judged.tokens_merged / tokens_per_step / most_steps, 4)
    came = Counter(each.outage.what for each in befell)
    return ChaosResult(
        seed=plan.seed,
        server_kills=storm.server_kills + came[OutageKind.SERVER_KILL],
        learner_kills=storm.learner_kills + came[OutageKind.KILL],
        learner_stops=storm.learner_stops + came[OutageKind.STOP],
        kills_by_point=dict(sorted(storm.by_point.items())),
        acknowledged=judged.acknowledged,
        acknowledged_lost=judged.acknowledged_lost,
        applied_twice=judged.applied_twice,
        digest_mismatches=len(judged.differences) + len(strange),
        voided=judged.voided,
        data=judged.data,
        fates=judged.fates,
        versions=judged.versions,
        events=judged.events,
        snapshots=judged.snapshots,
        starts=judged.starts,
        epochs=judged.epochs,
        leases_lapsed=judged.lapsed,
        recovery_s=Spread.of(
            _recoveries(storm, FaultKind.SERVER_KILL, FaultKind.SERVER_POINT)
            + delays(_of(befell, OutageKind.SERVER_KILL), works)
        ),
        learner_recovery_s=Spread.of(
            _recoveries(storm, FaultKind.LEARNER_KILL) + delays(_of(befell, OutageKind.KILL), works)
        ),
        away=gone,
        image=plan.image,
        learners=plan.learners,
        pace_s=plan.pace_s,
        mtbf_s=plan.mtbf_s,
        repair_s=plan.repair_s,
        outages=_suffered(storm.breaker.befell),
        unbegun=tuple(
            str(each) for each in storm.breaker.unbegun if each in plan.outages[: plan.scripted]
        ),
        by_kind=by_kind(befell, works, _acknowledged(course)),
        spent=_spent(course, goodput) if plan.faults == Faults() else None,
        models=_models(plan, course) if befell else None,
        late_s=Spread.of(_late(plan, course)),
        goodput=goodput,
        uptime=round(uptime(_counted(course), course.span, course.held), 4),
        tokens_trained=judged.tokens_trained,
        tokens_merged=judged.tokens_merged,
        tokens_per_s=round(judged.tokens_trained / max(1e-9, wall_s - held_s), 1),
        bytes_up=sum(up for up, _ in course.carried_bytes.values()),
        bytes_down=sum(down for _, down in course.carried_bytes.values()),
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


def _recoveries(storm: Storm, *kinds: FaultKind) -> list[float]:
    return [each.took_s for each in storm.absences if each.kind in kinds]


def _of(befell: list[Befell], kind: OutageKind) -> list[Befell]:
    return [each for each in befell if each.outage.what is kind]


def _suffered(befell: list[Befell]) -> tuple[Suffered, ...]:
    return tuple(
        Suffered(
            what=each.outage.what,
            whom=each.outage.whom,
            began_s=round(each.began_s, 2),
            ended_s=round(each.ended_s, 2),
            factor=each.outage.factor,
            mbit=each.outage.mbit,
        )
        for each in sorted(befell, key=lambda each: each.began_s)
    )


def _spent(course: Course, goodput: float) -> Spent:
    data = course.judgement.data
    gaps = {why: batches / data.fragments for why, batches in data.gaps.items()}
    paces_s = {island.name: island.pace_s for island in course.storm.plan.islands}
    return spent(course.befell, course.steps, course.span, paces_s, goodput, gaps)


def _late(plan: ChaosPlan, course: Course) -> list[float]:
    """By how much restarts took longer than they were to take, where that can be seen."""
    if plan.restart_s is None:
        return []
    due_s = plan.restart_s + plan.pace_s
    late = (taken_s - due_s for taken_s in restarts(course.befell, course.steps))
    return [by_s for by_s in late if by_s > LATE_S]


def _models(plan: ChaosPlan, course: Course) -> Models:
    """Under the outages of this run, with what a restart took in it, or was to take."""
    befell, span_s = course.storm.breaker.befell, length([course.span])
    taken = restarts(course.befell, course.steps)
    restart_s = statistics.median(taken) if taken else 0.0
    restart_s = restart_s if plan.restart_s is None else plan.restart_s
    checkpoint_s = plan.checkpoint_every_s or MODELLED_CHECKPOINT_S
    names = list(course.processes)
    rule = by_papers_rule(befell, names, span_s, restart_s, checkpoint_s)
    return Models(
        restart_s=round(restart_s, 2),
        checkpoint_s=checkpoint_s,
        data_parallel=round(as_one_job(befell, span_s, restart_s, checkpoint_s), 4),
        papers_rule=round(rule, 4),
    )


def _findings(
    course: Course, strange: list[str], gone: Away | None, gap: float | None
) -> list[str]:
    """A sentence for each promise that is broken, the gravest first."""
    judged = course.judgement
    findings = [*judged.findings, *judged.differences, *strange]
    unasked = judged.epochs - 1 - judged.rollbacks
    if unasked > 0:
        findings.append(f"{unasked} new epochs: a server found something missing")
    if not judged.finished:
        findings.append("the run is not finished by its tape")
    if gone is not None and gone.longest_pause_s > PAUSE_BOUND * gone.seconds:
        findings.append(f"a learner made no step for {gone.longest_pause_s} s without a server")
    if gap is not None and gap > LOSS_BOUND:
        findings.append(f"the loss is {gap:.2%} above that without faults")
    return [*findings, *_unasked_deaths(course.storm), *course.storm.undone]


def _unasked_deaths(storm: Storm) -> list[str]:
    """Sentences on processes that ended with an error by themselves."""
    return [
        f"{event.name} ended with exit code {event.exit_code} at {event.at_s:.1f} s: {event.detail}"
        for event in storm.cluster.processes.events
        if event.kind is EventKind.DIED and event.exit_code not in _ASKED_FOR[event.name == SERVER]
    ]


def _strange_digests(course: Course) -> list[str]:
    """Sentences on the server, and on learners that were there at the end, whose last weights are
    others than the tape's.
    """
    status, expected = course.storm.status, course.judgement.weights_digest
    if status is None:
        return ["no status was ever heard"]
    told = {"the server": status.weights_digest}
    # A learner that was being started again then, finds a finished run and takes nothing of it.
    present = [one for one in status.learners if one.state is LearnerState.LEFT]
    told |= {one.name: one.weights_digest for one in present}
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
    places = Places(storm.plan.out)
    for receipt in read_receipts(places.receipts(name) for name in course.processes):
        last[receipt.pid] = max(last.get(receipt.pid, 0.0), receipt.unix_s + offset_s)
    return [at_s for pid in course.lives for at_s in counted(storm.steps.times(pid), last.get(pid))]


def _acknowledged(course: Course) -> dict[str, list[float]]:
    """When contributions of each learner were taken; of the server, anybody's."""
    offset_s = time.monotonic() - time.time()
    places = Places(course.storm.plan.out)
    found: dict[str, list[float]] = defaultdict(list)
    for receipt in read_receipts(places.receipts(name) for name in course.processes):
        for unit in (receipt.key.learner, SERVER):
            found[unit].append(receipt.unix_s + offset_s)
    return found


def _away(course: Course) -> Away | None:
    """What the learners that were there all the time, and not stopped on purpose, did in the
    server's longest absence.
    """
    spans = [
        (one.began_s + course.offset_s, one.ended_s + course.offset_s)
        for one in course.storm.absences
        if one.kind is FaultKind.SERVER_AWAY
    ]
    if not spans:
        return None
    span = max(spans, key=lambda one: one[1] - one[0])
    stopped = {
        one.name
        for one in course.storm.absences
        if one.kind is FaultKind.LEARNER_STOP
        and one.began_s + course.offset_s < span[1]
        and one.ended_s + course.offset_s > span[0]
    }
    there = {
        name: course.storm.steps.times(pid)
        for name, pids in course.processes.items()
        for pid in pids
        if name not in stopped
        and course.lives[pid][1] >= span[1] and _began_before(course, pid, span[0])
    }  # fmt: skip
    return away(there, span)


def _began_before(course: Course, pid: int, at_s: float) -> bool:
    first = course.storm.steps.times(pid)[:1]
    return bool(first) and first[0] < at_s
