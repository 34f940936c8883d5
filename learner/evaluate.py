"""The evaluator: a role of its own that pulls global weights and reports their held-out loss."""

from __future__ import annotations

import threading
import time

import structlog

from fragments.records import Evaluation, Phase, Role, RunDescription
from learner.member import POLL_S, Member
from learner.ports import Link
from learner.program import Program

_log = structlog.get_logger(__name__)


class Evaluator:
    """Evaluates the broadcast copy whenever it has changed, at most every `every_s` seconds.

    It has no vote on the clock and contributes nothing. The weights of one
    evaluation are the newest version of each fragment at that moment.

    Args:
        name, program, link, description: as for `learner.run.Learner`.
        every_s: shortest time between two evaluations' starts, seconds.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        link: Link,
        description: RunDescription,
        every_s: float,
    ) -> None:
        self._program = program
        self._every_s = every_s
        self._evaluated: tuple[int, ...] | None = None
        self._member = Member(
            name,
            Role.EVALUATOR,
            program,
            link,
            description,
            on_ask=lambda ask: None,
            on_attached=lambda: None,
        )

    def run(self, stop: threading.Event) -> Evaluation | None:
        """Evaluate until the run is finished or `stop` is set; return the newest result.

        The first result is that of the weights found at joining, the last, of a
        finished run, that of its final weights. Raises RefusedError and
        UnreachableError as `Learner.run`.
        """
        newest: Evaluation | None = None
        member = self._member
        try:
            if member.join(stop) is None:
                return None
            while not stop.is_set() and member.session.progress.phase is not Phase.FINISHED:
                began_s = time.monotonic()
                newest = self._evaluate() or newest
                if member.session.failure is not None:
                    raise member.session.failure
                self._pause(stop, began_s + self._every_s)
            if not stop.is_set() and member.wait_newest(stop):
                newest = self._evaluate() or newest
            return newest
        finally:
            member.close("stopped" if stop.is_set() else "ended")

    def _pause(self, stop: threading.Event, until_s: float) -> None:
        while not stop.is_set() and self._member.session.progress.phase is not Phase.FINISHED:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            stop.wait(min(left_s, POLL_S))

    def _evaluate(self) -> Evaluation | None:
        """Adopt what is prepared; evaluate and report it, unless it was evaluated already."""
        island, session = self._member.island, self._member.session
        island.completed = island.adopt(island.completed).completed
        versions = tuple(base.version.number for base in island.completed.bases if base)
        if versions == self._evaluated:
            return None
        progress = session.progress
        loss = self._program.evaluate(island.completed.params)
        unit = self._program.loss_unit
        result = Evaluation(loss, unit, progress.global_step, progress.tokens_trained, versions)
        session.evaluated(result)
        self._evaluated = versions
        _log.info("evaluated", loss=loss, unit=unit, global_step=progress.global_step)
        return result
