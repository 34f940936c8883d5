"""A whole chaos run: the run, what befalls it, and the judgement."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from harness.chaos.breaker import Breaker
from harness.chaos.judgement import Judgement, referee_words
from harness.chaos.plan import KEEP_ALL, ChaosPlan, Places
from harness.chaos.plot import draw_chaos
from harness.chaos.points import Trap
from harness.chaos.report import report
from harness.chaos.result import ChaosResult
from harness.chaos.site import Units
from harness.chaos.steps import Steps, stamped
from harness.chaos.storm import Storm
from harness.chaos.summing import Course, course_of, summed_up
from harness.cluster import Cluster
from harness.contained import Containers
from harness.environment import command, module
from harness.ground import Ground, ThisMachine
from harness.plan import SERVER, names_of
from harness.ports import free_ports
from harness.processes import Command
from harness.watcher import StatusWatcher

_LOOK_S = 0.2
_TELL_S = 30.0
"""From one line about how far the run is to the next."""

_RESTARTS = 10_000
_START_LIMIT_S = 180.0
REFEREE = "referee"
_SETTLE_LIMIT_S = 120.0
_REFEREE_LIMIT_S = 1800.0
_STOP_S = 60.0
"""A server that is told to stop writes a last snapshot."""


@dataclass(slots=True)
class Chaos:
    """Does what a plan says, and leaves chaos.json, chaos.md and timeline.png beside the run. No
    process stays behind, however it ends; `stop` ends it early.
    """

    plan: ChaosPlan
    stop: threading.Event
    tell: Callable[[str], None]
    _told_s: float = field(default=0.0, init=False)

    def run(self, undisturbed: Judgement | None = None) -> ChaosResult:
        """All of it. `undisturbed`: of the same run without faults, where that was done already.

        Raises:
            StoppedError: when `stop` was set.
            DilocoError: when a process ended for good that should not, something took too long, or
                the tape cannot be judged.
        """
        if self.plan.compare and undisturbed is None:
            self.tell("the run without faults, to compare with")
            calm = replace(self.plan, out=self.plan.out / "undisturbed", is_calm=True)
            undisturbed = self._course(calm).judgement
            self.tell(f"its loss is {undisturbed.losses[-1].loss:.4f} {undisturbed.loss_unit}")
        course = self._course(self.plan)
        result = summed_up(self.plan, course, undisturbed)
        places = Places(self.plan.out)
        places.result.write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
        places.report.write_text(report(result) + "\n", encoding="utf-8")
        draw_chaos(course, undisturbed, places.timeline)
        return result

    def _course(self, plan: ChaosPlan) -> Course:
        plan.out.mkdir(parents=True, exist_ok=True)
        places = Places(plan.out.absolute())
        places.stamps.mkdir(exist_ok=True)
        self._told_s = 0.0
        names = names_of(plan.islands)
        with self._ground(plan, names) as ground:
            processes = ground.processes
            cluster = self._cluster(plan, places, ground)
            ground.prepare([*cluster.commands(plan.islands), _referee(cluster, places, names)])
            cluster.make_run()
            cluster.start_compiling()
            address = cluster.serve()
            ground.open(address, cluster.bulk_port)
            for island in plan.islands:
                cluster.learn(island)
            with StatusWatcher(address, _LOOK_S) as watcher:
                steps, trap = Steps(places.stamps), Trap(places.trap)
                paces_s = {island.name: island.pace_s for island in plan.islands}
                site = Units(
                    processes, ground.links, steps, paces_s, places.full, plan.restart_s, plan.link
                )
                breaker = Breaker(plan.storms, site, self.tell)
                storm = Storm(plan, cluster, watcher, steps, trap, breaker, self.tell)
                cluster.until(lambda: self._is_over(storm), plan.wall_limit_s, "the run")
                finished_s = processes.now_s
                self._settle(storm)
            processes.stop([SERVER], _STOP_S)
            judgement = self._judge(cluster, places, names)
            return course_of(storm, judgement, finished_s, ground.carried_bytes())

    def _ground(self, plan: ChaosPlan, names: list[str]) -> Ground:
        links = dict.fromkeys(names, plan.link)
        if plan.image is not None:
            return Containers(plan.image, plan.out, links, plan.data)
        control, bulk = free_ports(2)
        return ThisMachine(links, (control, bulk))

    def _cluster(self, plan: ChaosPlan, places: Places, ground: Ground) -> Cluster:
        spec = plan.spec.model_copy(
            update={
                "budget_tokens": plan.budget_tokens,
                "max_learners": plan.learners,
                "program": stamped(plan.spec.program, places.stamps),
            }
        )
        files = (str(places.trap.absolute()), str(places.full.absolute()))
        server = module("harness.chaos.server", *files, str(plan.snapshot_rounds))

        def entry(name: str) -> tuple[str, ...]:
            return server if name == SERVER and plan.has_traps else command()

        return Cluster(
            places.out, spec, ground.seen(plan.data), self.stop, ground.processes, _RESTARTS,
            entry=entry, serve_flags=("--keep-snapshots", str(KEEP_ALL)),
            learn_flags=lambda name: ("--receipts", str(places.receipts(name))),
            dialled=ground.dialled, checkpoint_every_s=plan.checkpoint_every_s,
            terms=ground.terms, server_restarts=_RESTARTS, start_limit_s=_START_LIMIT_S,
        )  # fmt: skip

    def _is_over(self, storm: Storm) -> bool:
        processes = storm.cluster.processes
        processes_needed = (SERVER, *names_of(storm.plan.islands))
        for name in processes_needed:
            if processes.settled(name) and processes.exit_code(name) != 0:
                processes.require_alive(name)
        is_over = storm.tick()
        self._tell_how_far(storm)
        return is_over

    def _tell_how_far(self, storm: Storm) -> None:
        status, now_s = storm.status, storm.cluster.processes.now_s
        by_clock = self.plan.tokens is not None
        if by_clock and storm.began_s is None:
            return
        if status is not None and now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            share = status.tokens_trained / status.tokens_budget
            # Lines about faults by the clock count from the first step; those by count do not.
            zero_s = storm.began_s if by_clock and storm.began_s is not None else 0.0
            self.tell(f"{now_s - zero_s:.1f} s: {share:.0%} of the tokens are trained")

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

        longest_s = max((outage.for_s for outage in storm.plan.storms), default=0.0)
        cluster.until(is_over, _SETTLE_LIMIT_S + longest_s, "the learners' end")

    def _judge(self, cluster: Cluster, places: Places, names: list[str]) -> Judgement:
        self.tell("the run is over; its tape is run again")
        cluster.processes.start(_referee(cluster, places, names))
        cluster.until(lambda: cluster.processes.settled(REFEREE), _REFEREE_LIMIT_S, "the judgement")
        if cluster.processes.exit_code(REFEREE) != 0:
            cluster.processes.require_alive(REFEREE)
        return Judgement.model_validate_json(places.judgement.read_text(encoding="utf-8"))


def _referee(cluster: Cluster, places: Places, names: list[str]) -> Command:
    """Judges what the run of `cluster` with these learners has left."""
    receipts = [places.receipts(name) for name in names]
    words = referee_words(cluster.run_dir, receipts, cluster.data, places.judgement)
    return Command(REFEREE, words, cluster.log(REFEREE), cluster.terms.environ(True))
