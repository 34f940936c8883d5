"""A learner on the virtual clock: a real island and real steps, at the times its world says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp

from fragments.errors import SettingsError
from fragments.layout import Layout
from fragments.records import Phase, Report, Version, Welcome
from fragments.runspec import RunSpec
from learner.held import Checkpoint, Completed
from learner.island import Island
from learner.program import Inner, Params, Program, Shard
from learner.tokens import TokenClock
from learner.warmup import InnerWarmup
from simulation.clock import Order, VirtualClock
from simulation.connection import Connection, Traffic
from simulation.ports import Server
from simulation.world import Link, Returns, StepTimes


@dataclass(slots=True)
class Tally:
    """What one learner did over all its processes. Steps lost: trained, then gone before anything
    that holds them was sent; a share of the fragments counts as that share.
    """

    steps: int = 0
    steps_lost: float = 0.0
    deaths: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """What all learners of a run share."""

    clock: VirtualClock
    server: Server
    program: Program
    spec: RunSpec
    layout: Layout
    structure: Params
    checkpoint_steps: int


class SimulatedLearner:
    """One name with its processes, one after the other.

    Args:
        setting: what all learners share.
        name: the learner's name.
        link: its line; `step_s` is the nominal step that the line's "steps" are measured in.
        times: seconds of its steps.
    """

    def __init__(
        self, setting: Setting, name: str, link: Link, step_s: float, times: StepTimes
    ) -> None:
        self.name = name
        self.tally = Tally()
        self.traffic = Traffic()
        self._setting = setting
        self._link = link
        self._step_s = step_s
        self._times = times
        self._processes = 0
        self._process: Process | None = None
        self._checkpoint: Checkpoint | None = None

    def start(self, returns: Returns = "fresh") -> None:
        """Begin a process, with what `returns` says of the last one's newest checkpoint."""
        self._process = Process(
            self._setting, self.name, self._link, self._step_s, self._times,
            self._processes, self.traffic, self.tally, self._checkpoint, returns,
        )  # fmt: skip
        self._processes += 1
        self._process.connection.connect()

    def die(self, returns: Returns) -> None:
        """Kill the process; the next one will have what `returns` says."""
        process = self._living()
        process.end()
        self.tally.deaths += 1
        self._checkpoint = process.checkpoint or self._checkpoint
        kept = self._checkpoint if returns == "kept" else None
        self.tally.steps_lost += process.steps_unsent(kept.completed.step if kept else 0)

    def cut(self) -> None:
        """Cut the line; training goes on."""
        self._living().connection.cut()

    def heal(self) -> None:
        """Give the line back."""
        process = self._living()
        process.cut_off()
        process.connection.connect()

    def stall(self) -> None:
        """Make no further step; the line stays."""
        self._living().stalled = True

    def resume(self) -> None:
        """Step on."""
        process = self._living()
        process.stalled = False
        process.wake()

    @property
    def finished(self) -> bool:
        """Has nothing more to do: no process, or one that holds the run's last versions."""
        return self._process is None or self._process.ended or self._process.finished

    @property
    def island(self) -> Island | None:
        """The present process's copy; None where there is no process."""
        return None if self._process is None or self._process.ended else self._process.island

    def _living(self) -> Process:
        if self._process is None or self._process.ended:
            raise SettingsError(
                f"world.befalls: something is to befall {self.name}, which has no process"
                f" at {self._setting.clock.now_s:.1f} s"
            )
        return self._process


class Process:
    """One process of a learner: `learner.trainer` on the virtual clock.

    A step is computed when it begins and counts when its time is over.
    """

    def __init__(
        self,
        setting: Setting,
        name: str,
        link: Link,
        step_s: float,
        times: StepTimes,
        number: int,
        traffic: Traffic,
        tally: Tally,
        left: Checkpoint | None,
        returns: Returns,
    ) -> None:
        self._setting = setting
        self._times = times
        self._tally = tally
        self._tokens = TokenClock()
        self._heard: object = None
        self._shard: Shard | None = None
        self._inner: Inner | None = None
        self._has_begun = False
        self._stepping = False
        self._begin_is_set = False
        self._cut_off: set[int] = set()
        self.stalled = False
        self.ended = False
        self.checkpoint: Checkpoint | None = None
        spec = setting.spec
        self._warmup = InnerWarmup(spec.inner_warmup_steps)
        self.island = Island(name, setting.layout, spec.codec, setting.structure, 0, spec.adoption)
        if left is not None and returns != "fresh":
            self._inner = left.inner
        if left is not None and returns == "kept":
            self.island.resume(left.completed)
        self.connection = Connection(
            setting.clock, setting.server, self.island, link, step_s, number, traffic,
            on_welcome=self._welcomed, on_change=self.wake,
        )  # fmt: skip

    @property
    def finished(self) -> bool:
        """Are the last versions of a finished run adopted?"""
        over = self.connection.progress.phase is Phase.FINISHED
        busy = self._stepping or self._begin_is_set
        return over and not busy and self.connection.idle

    def steps_unsent(self, kept_step: int) -> float:
        """Completed steps that neither an answer nor a checkpoint of `kept_step` holds, averaged
        over the fragments.
        """
        now = self.island.completed
        steps = [now.step - max(kept_step, self.connection.sent_step(base.step, p))
                 for p, base in enumerate(now.bases) if base is not None]  # fmt: skip
        return sum(steps) / len(now.bases)

    def end(self) -> None:
        """Be killed."""
        self.ended = True
        self.connection.cut()

    def cut_off(self) -> None:
        """The line is back: the next adoption of each fragment may overwrite what was not sent."""
        self._cut_off = set(range(len(self._setting.layout.fragments)))

    def wake(self) -> None:
        """Something has changed: go on stepping where that is due."""
        if self.ended or self._shard is None:
            return
        if not self._stepping and not self._begin_is_set:
            self._begin_is_set = True
            clock = self._setting.clock
            clock.at(clock.now_s, Order.BEGIN, self._begin)

    def _welcomed(self, welcome: Welcome) -> None:
        if self._shard is None:
            newest = [Version(welcome.epoch, number) for number in welcome.versions]
            shard = Shard(welcome.shard_index, welcome.shard_count)
            self.island.begin(newest, shard, welcome.cursor)
            for adopted in self.island.adopted():
                self.connection.adopted(adopted)
        self._shard = self.island.completed.shard

    def _begin(self) -> None:
        """A step's boundary: adopt what is prepared, then step unless there is a reason not to."""
        self._begin_is_set = False
        if self.ended or self._stepping or self._shard is None:
            return
        self._tell_paused(paused=False)
        adoption = self.island.adopt(self.island.completed)
        at = adoption.completed
        for adopted in adoption.adopted:
            self._tally.steps_lost += self._lost_by_adopting(adopted.fragment)
            self.connection.adopted(adopted)
        if not self._may_step(at):
            self.island.completed = at
            self._tell_paused(paused=self._is_bound(at))
            return
        program, progress = self._setting.program, self._progress(at.tokens)
        if self._inner is None:
            self._inner = program.init_inner(at.params)
        if not self._has_begun:
            self._has_begun = True
            if progress > 0:
                self._warmup.begin()
        batch = program.batch(self._shard, at.cursor)
        result = program.step(at.params, self._inner, batch, jnp.float32(progress))
        params = self._warmup.apply(at.params, result.params)
        tokens = at.tokens + program.tokens_per_step
        done = Completed(at.step + 1, tokens, at.cursor + 1, params, at.bases, at.shard)
        self._stepping = True
        step_s = self._times.next_s()
        self._setting.clock.after(
            step_s, Order.COMPLETION, self._completer(done, result.inner, step_s)
        )

    def _lost_by_adopting(self, fragment: int) -> float:
        """Steps, as a share of the fragments, that a partition kept from being sent and that the
        first adoption after it overwrites. (What is trained while an answer travels is overlap.)
        """
        now = self.island.completed
        base = now.bases[fragment]
        if fragment not in self._cut_off or base is None:
            return 0.0
        self._cut_off.discard(fragment)
        if self._setting.spec.adoption.mode == "rebase":
            return 0.0
        return (now.step - self.connection.sent_step(base.step, fragment)) / len(now.bases)

    def _tell_paused(self, *, paused: bool) -> None:
        """Let the server know where that has changed."""
        report = self.connection.last_report
        if report.paused != paused:
            self.connection.report(replace(report, paused=paused))

    def _may_step(self, at: Completed) -> bool:
        phase = self.connection.progress.phase
        if self.stalled or phase in (Phase.CLOSING, Phase.FINISHED):
            return False
        return all(base is not None for base in at.bases) and not self._is_bound(at)

    def _is_bound(self, at: Completed) -> bool:
        """Has it made as many steps on one base as the run allows?"""
        overlap = self._setting.spec.adoption.max_overlap_steps
        if overlap is None:
            return False
        progress, spec = self.connection.progress, self._setting.spec
        interval = progress.sync_interval_steps or spec.interval_steps(progress.tokens_trained)
        return any(
            base is not None and at.step - base.step >= interval + overlap for base in at.bases
        )

    def _progress(self, own_tokens: int) -> float:
        """Share of the budget that all have trained, as `learner.run` estimates it."""
        progress = self.connection.progress
        if progress is not self._heard:
            self._heard = progress
            self._tokens.observe(progress.tokens_trained, own_tokens)
        share = self._tokens.estimate(own_tokens) / self._setting.spec.budget_tokens
        return min(1.0, max(0.0, share))

    def _completer(self, done: Completed, inner: Inner, step_s: float) -> Callable[[], None]:
        def complete() -> None:
            if self.ended:
                return
            self._stepping = False
            self._inner = inner
            self.island.completed = done
            if done.step % self._setting.checkpoint_steps == 0:
                self.checkpoint = Checkpoint(done, inner)
            self._tally.steps += 1
            report = Report(done.step, done.tokens, done.cursor, step_s=step_s)
            self.connection.report(report)
            self.wake()

        return complete
