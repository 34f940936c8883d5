"""Many islands on this machine: one server, its learners and an evaluator, watched to the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fragments.records import Phase, RunStatus
from harness.cluster import Cluster
from harness.contained import Containers
from harness.drill import Drill
from harness.ground import Ground, ThisMachine
from harness.link import LinkShape
from harness.plan import EVALUATOR, SERVER, Island, LocalPlan, names_of
from harness.processes import EventKind, Supervisor
from harness.recorder import Recorder
from harness.summary import Circumstances, Summary, summarize
from harness.watcher import StatusWatcher

_LOOK_S = 0.2
"""Seconds between two looks at the status: about one step of a fast learner."""

_SETTLE_LIMIT_S = 30.0
"""From FINISHED until everybody has ended and the server knows all their digests."""

Show = Callable[[RunStatus | None, Recorder, Supervisor], None]
"""Draws the state of the run; called at every tick, and when there is no status yet."""


@dataclass(slots=True)
class LocalRun:
    """One run from birth to summary. Leaves no process behind, however it ends.

    `stop` ends it early. Call `run` once.
    """

    plan: LocalPlan
    stop: threading.Event
    show: Show
    recorder: Recorder = field(default_factory=Recorder)
    link_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """After the run: what the links of learners that have one carried, up and down."""
    _status: RunStatus | None = None
    _waiting: tuple[Island, ...] = ()

    def run(self) -> Summary:
        """Runs all of it.

        Raises:
            StoppedError: when `stop` was set.
            DilocoError: when a process that the run cannot do without has ended, or a time limit
                has passed; the message ends with that process's own last words.
        """
        plan = self.plan
        with self._ground() as ground:
            processes = ground.processes
            cluster = Cluster(
                plan.out.absolute(), plan.spec, ground.seen(plan.data), self.stop, processes,
                plan.max_restarts,
                at_tick=lambda: self.show(self._status, self.recorder, processes),
                checkpoint_every_s=plan.checkpoint_every_s,
                dialled=ground.dialled, terms=ground.terms,
            )  # fmt: skip
            ground.prepare(cluster.commands(plan.islands, plan.evaluate_every_s))
            cluster.make_run()
            cluster.start_compiling()
            address = cluster.serve()
            ground.open(address, cluster.bulk_port)
            cluster.learn(plan.islands[0])
            self._waiting = plan.islands[1:]
            if plan.lead_share == 0:
                self._start_waiting(cluster)
            cluster.evaluate(plan.evaluate_every_s)
            with StatusWatcher(address, _LOOK_S) as watcher:
                self._follow(cluster, watcher)
                self._settle(cluster, watcher)
            self.link_bytes = ground.carried_bytes()
            processes.stop([SERVER])
            self._require_clean(processes)
            return self._summary(processes)

    def _ground(self) -> Ground:
        plan = self.plan
        if plan.image is not None:
            links = {one.name: one.link or LinkShape() for one in plan.islands}
            return Containers(plan.image, plan.out, links, plan.data)
        return ThisMachine({one.name: one.link for one in plan.islands if one.link is not None})

    def _follow(self, cluster: Cluster, watcher: StatusWatcher) -> None:
        """Until the run is finished: kills what the drill says, and gives up on a lost cause."""
        drill = Drill(self.plan.kills)
        processes = cluster.processes

        def is_over() -> bool:
            fresh = self._look(processes, watcher, drill)
            if fresh is not None and fresh.tokens_trained >= self._lead_tokens:
                self._start_waiting(cluster)
            if not self._finished():
                processes.require_alive(SERVER)
                self._require_a_learner(processes)
            return self._finished()

        cluster.until(is_over, self.plan.wall_limit_s, "the run")

    @property
    def _lead_tokens(self) -> float:
        return self.plan.lead_share * self.plan.spec.budget_tokens

    def _start_waiting(self, cluster: Cluster) -> None:
        """Start the islands that let the first one begin alone."""
        waiting, self._waiting = self._waiting, ()
        for island in waiting:
            cluster.learn(island)

    def _started(self) -> list[str]:
        return [name for name in names_of(self.plan.islands) if name not in names_of(self._waiting)]

    def _settle(self, cluster: Cluster, watcher: StatusWatcher) -> None:
        """Until all but the server have ended, and one more look after that."""
        names = [*self._started(), EVALUATOR]
        processes = cluster.processes
        all_ended = False

        def is_over() -> bool:
            nonlocal all_ended
            fresh = self._look(processes, watcher, Drill(()))
            if all_ended:
                return fresh is not None or processes.settled(SERVER)
            all_ended = all(processes.settled(name) for name in names)
            return False

        cluster.until(is_over, _SETTLE_LIMIT_S, "the learners' end")

    def _look(
        self, processes: Supervisor, watcher: StatusWatcher, drill: Drill
    ) -> RunStatus | None:
        """Takes the newest status, if there is a new one, and does what it calls for."""
        fresh = watcher.take()
        if fresh is not None:
            self._status = fresh
            for learner in self.recorder.record(fresh, processes.now_s):
                processes.note(learner.name, EventKind.REJOINED, detail=f"join {learner.joins}")
            for order in drill.due(fresh):
                processes.kill(order.name, f"kill -9 at its step {order.step}")
        return fresh

    def _finished(self) -> bool:
        return self._status is not None and self._status.phase is Phase.FINISHED

    def _require_a_learner(self, processes: Supervisor) -> None:
        names = self._started()
        if all(processes.settled(name) for name in names):
            processes.require_alive(names[0])

    def _require_clean(self, processes: Supervisor) -> None:
        for name in (*self._started(), EVALUATOR, SERVER):
            if processes.exit_code(name) != 0:
                processes.require_alive(name)

    def _summary(self, processes: Supervisor) -> Summary:
        islands = self.plan.islands
        return summarize(
            self.recorder,
            Circumstances(
                paces_s={island.name: island.pace_s for island in islands},
                restarts={name: processes.restarts(name) for name in self._started()},
                events=processes.events,
                total_s=processes.now_s,
            ),
        )


def summary_path(out: Path) -> Path:
    """Where the summary of a local run is."""
    return out / "summary.json"
