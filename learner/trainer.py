"""The inner loop: the training thread never waits for the network.

Step N+1 is dispatched before step N is waited for, so the device is never idle
for the host's sake. Between dispatches prepared fragments are adopted. After
each completed step the learner publishes an immutable `Completed`, from which
asks are answered, and reports a few numbers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import structlog

from fragments.errors import NonFiniteError
from fragments.records import Adopted, Report
from learner.held import Checkpoint, Completed
from learner.island import Island
from learner.program import Inner, Program
from learner.warmup import InnerWarmup

_log = structlog.get_logger(__name__)

SMOOTHING = 0.1
"""Weight of the newest step in the smoothed step time."""


MAX_RESTARTS = 3
"""Losses that are not finite, in a row, after which a learner gives up."""

PAUSE_POLL_S = 0.2
"""How often a paused trainer looks whether it is to stop."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A dispatched step: its counters, its (future) values, and its loss."""

    completed: Completed
    inner: Inner
    loss: Any


@dataclass(slots=True)
class Pace:
    """Where the training thread's time went, in seconds since it began."""

    total_s: float = 0.0
    sync_s: float = 0.0
    step_s: float = 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time that synchronisation took from the training thread."""
        return self.sync_s / self.total_s if self.total_s > 0 else 0.0


class Trainer:
    """Steps a program and keeps its island in step.

    Args:
        program: what is trained.
        island: holds fragments and bases; every fragment is prepared already.
        progress: own tokens -> share of the budget trained by all, in [0, 1].
        on_report: called after every completed step; must not block.
        on_adopted: called for every adopted version, and again for all that are held after a loss
            that is not finite, since they are trained on anew from there; must not block.
        pace_s: shortest time from one step's start to the next's; 0 for none.
        most_steps_on_base: the trainer pauses rather than make more steps on one
            base; None for never (the default: nobody waits).
        inner: the inner state to go on with; None for a fresh one.
        warmup_steps: how many first steps are shortened in mid-run; see `InnerWarmup`.
        on_completed: called after every completed step, with the inner state after it; must not
            block.
    """

    def __init__(
        self,
        program: Program,
        island: Island,
        progress: Callable[[int], float],
        on_report: Callable[[Report], None],
        on_adopted: Callable[[Adopted], None],
        pace_s: float = 0.0,
        most_steps_on_base: Callable[[], int | None] = lambda: None,
        inner: Inner | None = None,
        warmup_steps: int = 0,
        on_completed: Callable[[Completed, Inner], None] | None = None,
    ) -> None:
        self._program = program
        self._island = island
        self._progress = progress
        self._on_report = on_report
        self._on_adopted = on_adopted
        self._pace_s = pace_s
        self._most_steps_on_base = most_steps_on_base
        self.pace = Pace()
        self._inner: Inner | None = inner
        self._warmup = InnerWarmup(warmup_steps)
        self._has_begun = False
        self._on_completed = on_completed
        self._restarts = 0
        self._is_sick = False

    def warm_up(self) -> None:
        """Compile the inner step, so that the first counted step costs what the others do."""
        now = self._island.completed
        inner = self._program.init_inner(now.params)
        batch = self._program.batch(now.shard, now.cursor)
        self._program.step(now.params, inner, batch, jnp.float32(0)).loss.block_until_ready()
        self._warmup.warm_up(now.params)

    def checkpoint(self) -> Checkpoint | None:
        """What this learner could go on from; for the training thread, while it does not `run`.
        None before the first step.
        """
        if self._inner is None or self._island.completed.step == 0:
            return None
        return Checkpoint(self._island.completed, self._inner)

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; the step under way is completed and counted. May be called
        again: inner state is kept.

        Raises NonFiniteError when the loss is not finite MAX_RESTARTS times in a row.
        """
        self.adopt_now()
        at = self._island.completed
        if not self._has_begun:
            self._has_begun = True
            self._begin(at, self._inner)
        in_flight: _InFlight | None = None
        before_s = self.pace.total_s
        began_s = last_s = time.monotonic()
        while not stop.is_set():
            step_began_s = time.monotonic()
            self.pace.total_s = before_s + step_began_s - began_s
            at = self._adopt(at)
            if self._is_bound(at):
                at, last_s = self._settle(at, in_flight, last_s)
                in_flight = None
                if self._is_bound(at):
                    self._pause(at, stop)
                continue
            at, in_flight, last_s = self._advance(at, in_flight, last_s)
            if self._pace_s > 0:
                stop.wait(self._pace_s - (time.monotonic() - step_began_s))
            if self._is_sick:
                in_flight, at = None, self._start_over(at)
            elif (moved := self._island.moved(at)) is not None:
                # A step under way is made, and counts; its progress is given up with the rest.
                in_flight, at, self._island.completed = None, moved, moved
        self._settle(at, in_flight, last_s)

    def _settle(
        self, at: Completed, in_flight: _InFlight | None, last_s: float
    ) -> tuple[Completed, float]:
        """Complete the step under way, where there is one, and publish what was adopted since it
        began: until then the values that this replaced are kept, to answer from.

        Returns where training stands now, and when a step was last completed.
        """
        if in_flight is not None:
            last_s = self._complete(in_flight, last_s)
            if self._is_sick:
                return self._start_over(at), last_s
        self._island.completed = at
        return at, last_s

    def _start_over(self, at: Completed) -> Completed:
        """After a loss that is not finite: the global weights and fresh inner state.

        What was trained since the bases were adopted is given up; it would be
        declined as not finite, and inner moments do not heal. The bases are those of `at`, the
        newest that the server was told of: the last completed step may have older ones. Steps and
        tokens are those of the last completed step, as nothing after it was counted.
        """
        self._restarts += 1
        done = self._island.completed
        _log.warning("loss_not_finite", step=done.step, restarts=self._restarts)
        if self._restarts > MAX_RESTARTS:
            raise NonFiniteError(
                f"the loss was not finite {self._restarts} times in a row, each time from the "
                "global weights: lower the inner learning rate, or look at the data"
            )
        # The bad batch itself is passed over: its step is not counted, its place in the data is.
        at = self._island.from_bases(replace(done, bases=at.bases, cursor=done.cursor + 1))
        self._begin(at, None)
        self._island.completed = at
        self._is_sick = False
        # The server was told of the newest ones at a step that was not counted, and would wait for
        # the one after it before it asks: who is bound to pause before then would never be asked.
        for adopted in self._island.adopted():
            self._on_adopted(adopted)
        return at

    def _begin(self, at: Completed, inner: Inner | None) -> None:
        """With that inner state, or a fresh one; with care, unless the run begins as well."""
        self._inner = self._program.init_inner(at.params) if inner is None else inner
        if self._progress(at.tokens) > 0:
            self._warmup.begin()

    def _is_bound(self, at: Completed) -> bool:
        most = self._most_steps_on_base()
        if most is None:
            return False
        return any(base is not None and at.step - base.step >= most for base in at.bases)

    def _pause(self, at: Completed, stop: threading.Event) -> None:
        """Wait for a new version; what this costs is counted as synchronisation."""
        began_s = time.monotonic()
        here = Report(at.step, at.tokens, at.cursor, self.pace.wait_share, self.pace.step_s)
        self._on_report(replace(here, paused=True))
        while self._is_bound(at) and not stop.is_set():
            if self._island.wait_prepared(PAUSE_POLL_S):
                break
        # Before it is said what is adopted: what is held then is no reason to pause.
        self._on_report(here)
        paused_s = time.monotonic() - began_s
        self.pace.sync_s += paused_s
        self.pace.total_s += paused_s

    def adopt_now(self) -> None:
        """Adopt what is prepared while no step is under way."""
        self._island.completed = self._adopt(self._island.completed)

    def _adopt(self, at: Completed) -> Completed:
        began_s = time.monotonic()
        adoption = self._island.adopt(at)
        for adopted in adoption.adopted:
            self._on_adopted(adopted)
        self.pace.sync_s += time.monotonic() - began_s
        return adoption.completed

    def _advance(
        self, at: Completed, before: _InFlight | None, last_s: float
    ) -> tuple[Completed, _InFlight | None, float]:
        """Dispatch a step, then wait for the one before. A paced step is waited for itself: it has
        time to finish before the next begins.

        Returns what the step leads to, what is in flight now, and when a step was last completed.
        Nothing else keeps what is over: its bases and parameters are two copies of the model.
        """
        now = self._dispatch(at)
        if self._pace_s > 0:
            return now.completed, None, self._complete(now, last_s)
        if before is not None:
            last_s = self._complete(before, last_s)
        return now.completed, now, last_s

    def _dispatch(self, at: Completed) -> _InFlight:
        batch = self._program.batch(at.shard, at.cursor)
        progress = jnp.float32(min(1.0, max(0.0, self._progress(at.tokens))))
        result = self._program.step(at.params, self._inner, batch, progress)
        self._inner = result.inner
        params = self._warmup.apply(at.params, result.params)
        tokens = at.tokens + self._program.tokens_per_step
        after = Completed(at.step + 1, tokens, at.cursor + 1, params, at.bases, at.shard)
        return _InFlight(after, result.inner, result.loss)

    def _complete(self, step: _InFlight, last_s: float) -> float:
        """Wait for the device to finish `step`, publish it and report it."""
        loss = float(step.loss)
        self._is_sick = not math.isfinite(loss)
        if self._is_sick:
            return time.monotonic()
        self._restarts = 0
        now_s = time.monotonic()
        pace = self.pace
        newest_s = now_s - last_s
        step_s = (
            newest_s if pace.step_s == 0 else pace.step_s + SMOOTHING * (newest_s - pace.step_s)
        )
        # A pace is kept from one beginning to the next. Between two ends it may be less, and up to
        # the first end there is no more than its computing.
        pace.step_s = max(self._pace_s, step_s)
        done = step.completed
        self._island.completed = done
        report = Report(done.step, done.tokens, done.cursor, pace.wait_share, pace.step_s, loss)
        self._on_report(report)
        if self._on_completed is not None:
            self._on_completed(done, step.inner)
        pace.sync_s += time.monotonic() - now_s
        return now_s
