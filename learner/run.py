"""One learner from joining to the end of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from fragments.digest import combine
from fragments.records import (
    Ask,
    Contribution,
    Phase,
    Receipt,
    Report,
    Role,
    RunDescription,
)
from learner.checkpoint import Checkpoints, Writer
from learner.keeper import Keeper
from learner.member import POLL_S, Member
from learner.outbox import Outbox
from learner.ports import Link
from learner.program import Inner, Program
from learner.tokens import TokenClock
from learner.trainer import Trainer

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointRule:
    """Where checkpoints go, and the shortest time between two.

    A learner that is stopped writes one more, of its last step, and gives it `keeper.STOP_S`: what
    takes longer is left unfinished, and the one before stays.
    """

    directory: Path
    every_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a learner ended. `finished`: the run's budget is trained; else it was stopped."""

    finished: bool
    steps: int
    tokens: int
    weights_digest: str
    wait_share: float


class Learner:
    """Wires member, outbox and trainer of one process.

    Args:
        name: unique within the run.
        program: what is trained; must be the one that the run was made with.
        link: the outer server.
        description: what `link.describe()` said.
        pace_s: shortest time from one step's start to the next's; 0 for none.
        on_state: told "joining", "training", "finished" or "stopped".
        on_receipt: told of each contribution that the server has; must not block for long.
        checkpoints: the newest one of an earlier process is gone on from, and more are written;
            None for none.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        link: Link,
        description: RunDescription,
        pace_s: float = 0.0,
        on_state: Callable[[str], None] = lambda state: None,
        on_receipt: Callable[[Contribution, Receipt], None] = lambda _what, _receipt: None,
        checkpoints: CheckpointRule | None = None,
    ) -> None:
        self._program = program
        self._pace_s = pace_s
        self._on_state = on_state
        self._member = Member(
            name,
            Role.LEARNER,
            program,
            link,
            description,
            on_ask=self._asked,
            on_attached=self._attached,
        )
        self._island, self._session = self._member.island, self._member.session
        self._outbox = Outbox(self._island, link, self._session, on_receipt)
        self._tokens = TokenClock()
        self._heard = self._session.progress
        self._inner: Inner | None = None
        self._checkpoints: Checkpoints | None = None
        self._keeper: Keeper | None = None
        if checkpoints is not None:
            self._checkpoints = Checkpoints(
                checkpoints.directory, description.run_id, self._member.layout, name
            )
            self._keeper = Keeper(self._checkpoints, checkpoints.every_s, self._writer)

    def run(self, stop: threading.Event) -> Outcome:
        """Train until the run is finished or `stop` is set.

        Raises RefusedError when the server will not have this learner (wrong
        run, model or release; fenced off by a newer process of the same name),
        UnreachableError when it is away for too long at the start, CheckpointError
        where its directory has checkpoints of another run or learner.
        """
        self._on_state("joining")
        self._resume()
        self._island.warm_up()
        try:
            if self._member.join(stop) is None:
                return self._outcome(0.0, finished=False)
            return self._train(stop)
        finally:
            self._outbox.stop()
            self._member.close("stopped" if stop.is_set() else "ended")
            if self._keeper is not None:
                self._keeper.stop()

    def _resume(self) -> None:
        """Take over what an earlier process has left, if anything."""
        if self._checkpoints is None:
            return
        params = self._island.completed.params
        kept = self._checkpoints.newest(params, self._program.init_inner)
        if kept is not None:
            at = kept.completed
            _log.info("resumed", step=at.step, tokens=at.tokens, cursor=at.cursor)
            self._member.resume(at)
            self._inner = kept.inner

    def _writer(self) -> Writer:
        return Writer(self._session.lease.token, self._member.incarnation)

    def _make_trainer(self) -> Trainer:
        inner, self._inner = self._inner, None  # It is a model's size or two: nobody else keeps it.
        keeper = self._keeper
        return Trainer(
            self._program,
            self._island,
            self._share_trained,
            self._report,
            self._session.adopted,
            self._pace_s,
            self._most_steps_on_base,
            inner=inner,
            warmup_steps=self._member.spec.inner_warmup_steps,
            on_completed=keeper.completed if keeper is not None else None,
        )

    def _train(self, stop: threading.Event) -> Outcome:
        self._outbox.start()
        trainer = self._make_trainer()
        trainer.warm_up()
        if self._keeper is not None:
            self._keeper.start()
        for adopted in self._island.adopted():
            self._session.adopted(adopted)
        self._on_state("training")
        finished = False
        # A server that is restarted in the closing lap may go back to before it: then train on.
        while not finished and not stop.is_set():
            self._step_until_over(trainer, stop)
            finished = self._member.wait_over(stop)
        if finished:
            trainer.adopt_now()
        elif self._keeper is not None:
            self._keeper.keep(trainer.checkpoint())
        self._on_state("finished" if finished else "stopped")
        return self._outcome(trainer.pace.wait_share, finished=finished)

    def _step_until_over(self, trainer: Trainer, stop: threading.Event) -> None:
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(stop, over), name="watch", daemon=True)
        watcher.start()
        trainer.run(over)
        over.set()
        watcher.join()

    def _watch(self, stop: threading.Event, over: threading.Event) -> None:
        """Set `over` once stepping is to end, for whichever reason."""
        session = self._session
        while not (
            stop.is_set()
            or over.is_set()
            or session.failure is not None
            or session.progress.phase in (Phase.CLOSING, Phase.FINISHED)
        ):
            session.wait_change(POLL_S)
        over.set()

    def _asked(self, ask: Ask) -> None:
        self._outbox.ask(ask)

    def _attached(self) -> None:
        self._outbox.retry()

    def _report(self, report: Report) -> None:
        busy_steps = max(self._outbox.backlog.steps, self._member.inbox.backlog.steps)
        outruns = busy_steps >= self._interval_steps()
        self._session.report(replace(report, outruns=outruns))

    def _interval_steps(self) -> int:
        """The H that the server's slots follow; what the spec says before it was first told."""
        progress = self._session.progress
        told = progress.sync_interval_steps
        return told or self._member.spec.interval_steps(progress.tokens_trained)

    def _most_steps_on_base(self) -> int | None:
        overlap = self._member.spec.adoption.max_overlap_steps
        return None if overlap is None else self._interval_steps() + overlap

    def _share_trained(self, own_tokens: int) -> float:
        progress = self._session.progress
        if progress is not self._heard:
            self._heard = progress
            self._tokens.observe(progress.tokens_trained, own_tokens)
        budget_tokens = progress.budget_tokens or self._member.spec.budget_tokens
        return self._tokens.estimate(own_tokens) / budget_tokens

    def _outcome(self, wait_share: float, *, finished: bool) -> Outcome:
        now = self._island.completed
        held = [
            (base.version.epoch, fragment, base.version.number, base.digest)
            for fragment, base in enumerate(now.bases)
            if base is not None
        ]
        return Outcome(finished, now.step, now.tokens, combine(held), wait_share)
