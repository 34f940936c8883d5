"""A server that applies every contribution alone, as it arrives: what the study shows to lose.

It grants leases, counts reports and notes bases with the core's own functions, and a base counts
once as in the core; whom it asks, and when, are rules of its own in place of rounds. No lease
lapses, and no push is too stale for it. It exists in the simulation only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import jax.numpy as jnp

from fragments.errors import NonFiniteError
from fragments.records import (
    Ask,
    Contribution,
    Lease,
    Phase,
    Published,
    Receipt,
    Refusal,
    RefusalCode,
    Update,
    Version,
)
from outer_server.core import membership, receive
from outer_server.core.clock import pass_slots
from outer_server.core.events import Attached, Declined, Event, HasAdopted, Join, Reply, Reported
from outer_server.core.state import (
    ContributionMeta,
    MergeOrder,
    Participant,
    RunState,
    SlotClock,
)
from outer_server.core.step import FragmentParameters
from outer_server.holdings import Holdings, Sink
from outer_server.parameters import Parameters
from simulation.async_policies import FractionalState
from simulation.clock import Order, VirtualClock
from simulation.server import PROGRESS_EVERY_S

Paced = Literal["learner", "server"]
"""Who says when a fragment is pushed: every learner by its own steps, or the fastest for all."""


class AsyncServer:
    """The same face as `SimulatedServer`, with no round behind it.

    A fragment is due every H steps, offsets spread as in the production clock: of each learner by
    itself ("learner"), or of the fastest for all of them ("server"). A push makes a new version at
    once; its sender pulls it ("learner"), or everybody does ("server"). At the budget everybody
    is asked once more for everything, as in the closing lap.
    """

    def __init__(
        self,
        clock: VirtualClock,
        state: RunState,
        parameters: Parameters,
        paced: Paced,
        tokens_per_step: int,
        on_event: Callable[[], None],
    ) -> None:
        self.state = replace(state, phase=Phase.TRAINING)
        self.parameters = parameters
        self._clock = clock
        self._paced = paced
        self._tokens_per_step = tokens_per_step
        self._on_event = on_event
        self._holdings = Holdings(parameters, state)
        self._slots: dict[str, SlotClock] = {}
        self._unanswered: set[tuple[str, int]] = set()
        clock.after(PROGRESS_EVERY_S, Order.TIMER, self._tell_progress)

    @property
    def published(self) -> list[FragmentParameters]:
        """All fragments as learners may pull them."""
        return self._holdings.published

    def call(self, event: Event, sink: Sink | None = None) -> Reply:
        """Handle what a learner says."""
        reply: Reply = None
        match event:
            case Join():
                joined = membership.join(
                    self.state, event, self._clock.now_s, self.parameters.layout.digest
                )
                self.state, reply = joined[0], joined[1]
            case Attached(learner=learner):
                if sink is not None:
                    self._holdings.attach(learner, sink)
            case Reported(learner=learner):
                self.state = receive.report(self.state, event, self._clock.now_s)
                self._moved(learner)
            case HasAdopted():
                self.state, _ = receive.adopted(self.state, event, self._clock.now_s)
            case Declined(learner=learner, decline=decline):
                self._answered(learner, decline.fragment)
            case _:
                raise TypeError(f"a learner does not say {event!r}")
        self._on_event()
        return reply

    def contribute(self, lease: Lease, contribution: Contribution) -> Reply:
        """Apply it at once, alone; a base that was pushed already changes nothing."""
        index, learner = contribution.key.fragment, lease.learner
        base = self.state.learners[learner].bases[index]
        if contribution.key.base_version.number <= base.consumed:
            self._answered(learner, index)
            return Receipt(contribution.key, duplicate=True)
        version = self.state.fragments[index].version
        meta = ContributionMeta(
            contribution.key,
            contribution.steps,
            contribution.tokens,
            contribution.cursor_from,
            contribution.cursor_to,
        )
        order = MergeOrder(index, version, (Participant(learner, (meta,), 1.0),))
        self._tell_share(index, contribution.tokens)
        try:
            update, parameters = self.parameters.apply(
                order, {contribution.key: contribution.payload}, self.state.epoch
            )
        except NonFiniteError as error:
            self._answered(learner, index)
            return Refusal(RefusalCode.BAD_PAYLOAD, str(error))
        self._holdings.put_out(update, parameters)
        self._book(learner, index, contribution, update)
        notice = Published(index, Version(self.state.epoch, update.version.number))
        self._holdings.send(None if self._paced == "server" else learner, notice)
        self._answered(learner, index)
        self._on_event()
        return Receipt(contribution.key)

    def updates(self, fragment: int, have: Version | None) -> tuple[Update, ...]:
        """What leads from `have` to the newest version."""
        return self._holdings.publications.updates(fragment, have)

    def detach(self, learner: str) -> None:
        """The stream of a learner broke."""
        self._holdings.detach(learner)

    def _tell_share(self, index: int, tokens: int) -> None:
        """Let fractional momentum know f of this push; other policies have no use for it."""
        fragments = list(self.parameters.fragments)
        outer = fragments[index].outer
        if isinstance(outer, FractionalState):
            learners = max(1, len(self.state.live_learners))
            whole = learners * self.state.interval_steps * self._tokens_per_step
            outer = outer._replace(share=jnp.float32(tokens / whole))
            fragments[index] = fragments[index]._replace(outer=outer)
            self.parameters.fragments = tuple(fragments)

    def _book(self, learner: str, index: int, contribution: Contribution, update: Update) -> None:
        state = self.state
        fragment = replace(
            state.fragments[index], version=update.version.number, digest=update.digest
        )
        record = state.learners[learner]
        tally = replace(
            record.tally,
            contributions_merged=record.tally.contributions_merged + 1,
            tokens_merged=record.tally.tokens_merged + contribution.tokens,
        )
        base = replace(record.bases[index], consumed=contribution.key.base_version.number)
        record = replace(record.with_base(index, base), tally=tally)
        state = state.with_fragment(index, fragment).with_learner(record)
        self.state = replace(
            state,
            tokens_pushed=state.tokens_pushed + contribution.tokens,
            tokens_merged=state.tokens_merged + contribution.tokens,
            rounds_merged=state.rounds_merged + 1,
        )

    def _moved(self, learner: str) -> None:
        """A learner made a step: ask for what has become due by it."""
        if self.state.phase is not Phase.TRAINING:
            return
        if self.state.tokens_trained >= self.state.spec.budget_tokens:
            self._close()
            return
        record = self.state.learners[learner]
        position = record.report.step
        if self._paced == "learner":
            for index in self._due(learner, position):
                self._ask(learner, index)
        elif position > self.state.global_step:
            self.state = replace(self.state, global_step=position)
            for index in self._due("", position):
                for other in self.state.live_learners:
                    self._ask(other.name, index)

    def _due(self, whose: str, step: int) -> tuple[int, ...]:
        """Fragments whose slots `step` has passed, on the clock of that learner or of all ("")."""
        slots = self._slots.get(whose, self.state.slots)
        moved, due = pass_slots(replace(self.state, slots=slots, global_step=step))
        self._slots[whose] = moved.slots
        return due

    def _ask(self, learner: str, index: int) -> None:
        version = Version(self.state.epoch, self.state.fragments[index].version)
        self._holdings.send(learner, Ask(index, version))

    def _close(self) -> None:
        self._enter(Phase.CLOSING)
        for record in self.state.live_learners:
            for index in range(len(self.state.fragments)):
                self._unanswered.add((record.name, index))
                self._ask(record.name, index)
        lap_s = self.state.spec.closing_lap_s
        self._clock.after(lap_s, Order.TIMER, lambda: self._enter(Phase.FINISHED))

    def _answered(self, learner: str, index: int) -> None:
        self._unanswered.discard((learner, index))
        if self.state.phase is Phase.CLOSING and not self._unanswered:
            self._enter(Phase.FINISHED)

    def _enter(self, phase: Phase) -> None:
        if self.state.phase is Phase.FINISHED:
            return
        self.state = replace(self.state, phase=phase)
        if phase is Phase.FINISHED:
            for index, fragment in enumerate(self.state.fragments):
                version = Version(self.state.epoch, fragment.version)
                self._holdings.send(None, Published(index, version))
        self._tell_now()
        self._on_event()

    def _tell_now(self) -> None:
        self._holdings.send(None, membership.progress(self.state))

    def _tell_progress(self) -> None:
        self._tell_now()
        self._clock.after(PROGRESS_EVERY_S, Order.TIMER, self._tell_progress)
