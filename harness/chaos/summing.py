"""From how a chaos run went to what it came to."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from fragments.records import LearnerState
from harness.chaos.figures import Span, away, counted, length, uptime
from harness.chaos.judgement import Judgement
from harness.chaos.ledger import read_receipts
from harness.chaos.plan import ChaosPlan, Places
from harness.chaos.result import LOSS_BOUND, PAUSE_BOUND, Away, ChaosResult, Spread
from harness.chaos.schedule import FaultKind
from harness.chaos.storm import Storm
from harness.plan import SERVER, names_of
from harness.processes import EventKind

_ASKED_FOR = {True: {-signal.SIGKILL}, False: {-signal.SIGKILL, 3}}
"""Exit codes of a server's and of any other process's death that are no finding: 3 is that of a
learner that was started again while no server was there, which it is until there is one."""


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


def course_of(storm: Storm, judgement: Judgement, finished_s: float) -> Course:
    """From what was noted; `finished_s`: when that was heard, on the supervisor's clock."""
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
    gone, strange = _away(course), _strange_digests(course)
    findings = _findings(course, strange, gone, gap)
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
        snapshots=judged.snapshots,
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
