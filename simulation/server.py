"""The outer server on the virtual clock: the scheduler of production, its effects performed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from fragments.payload import Payload
from fragments.records import (
    Contribution,
    Lease,
    Receipt,
    Update,
    Version,
)
from outer_server import status
from outer_server.core import membership
from outer_server.core.events import (
    Attached,
    Contributed,
    Effect,
    Event,
    Note,
    Publish,
    Reply,
    StartMerge,
    Tick,
)
from outer_server.core.scheduler import Outcome, handle
from outer_server.core.state import ContributionMeta, MergeOrder, RunState
from outer_server.core.step import FragmentParameters
from outer_server.holdings import Holdings, Sink
from outer_server.parameters import Parameters
from simulation.clock import Order, Scheduled, VirtualClock
from simulation.late import AgainstCurrent

PROGRESS_EVERY_S = 1.0
"""How often clock and phase are told to everyone, as the real server does."""


class SimulatedServer:
    """One run: what `outer_server.engine` is to threads, this is to the virtual clock.

    Args:
        clock: the run's.
        state: where to begin.
        parameters: the tensors; changed by this server alone.
        merge_s: what a merge takes; merges follow one another.
        on_event: called after every event has been dealt with.
        late: what late contributions are taken against; their own base, if not given.
        on_outcome: told every event and what came of it.
    """

    def __init__(
        self,
        clock: VirtualClock,
        state: RunState,
        parameters: Parameters,
        merge_s: float = 0.0,
        on_event: Callable[[], None] = lambda: None,
        late: AgainstCurrent | None = None,
        on_outcome: Callable[[Event, Outcome], None] = lambda event, outcome: None,
    ) -> None:
        self._on_outcome = on_outcome
        self.state = state
        self.parameters = parameters
        self.notes: list[Note] = []
        self._holdings = Holdings(parameters, state)
        self._clock = clock
        self._merge_s = merge_s
        self._on_event = on_event
        self._late = late
        self._merger_free_at_s = 0.0
        self._tick: Scheduled | None = None
        clock.after(PROGRESS_EVERY_S, Order.TIMER, self._tell_progress)

    @property
    def published(self) -> list[FragmentParameters]:
        """All fragments as learners may pull them."""
        return self._holdings.published

    def call(self, event: Event, sink: Sink | None = None) -> Reply:
        """Handle one event at the present moment; its reply, if it has one."""
        if isinstance(event, Attached) and sink is not None:
            refusal = membership.check_lease(self.state, event.learner, event.token)
            if refusal is not None:
                return refusal
            self._holdings.attach(event.learner, sink)
        return self._handle(event, None)

    def contribute(self, lease: Lease, contribution: Contribution) -> Reply:
        """Take a contribution that has arrived whole."""
        meta = ContributionMeta(
            contribution.key,
            contribution.steps,
            contribution.tokens,
            contribution.cursor_from,
            contribution.cursor_to,
        )
        digest = status.payload_digest(contribution.payload)
        event = Contributed(
            lease.learner,
            lease.token,
            meta,
            contribution.asked_version,
            digest,
            contribution.base_digest,
        )
        return self._handle(event, contribution.payload)

    def updates(self, fragment: int, have: Version | None) -> tuple[Update, ...]:
        """What leads from `have` to the newest version."""
        return self._holdings.publications.updates(fragment, have)

    def detach(self, learner: str) -> None:
        """The stream of a learner broke."""
        self._holdings.detach(learner)

    def _handle(self, event: Event, payload: Payload | None) -> Reply:
        outcome = handle(self.state, event, self._clock.now_s, self.parameters.layout.digest)
        self._on_outcome(event, outcome)
        receipt = outcome.reply
        is_new = isinstance(receipt, Receipt) and not receipt.duplicate
        if isinstance(receipt, Receipt) and is_new and payload is not None:
            if receipt.late and self._late is not None:
                payload = self._late.to_merge(receipt, payload, self.published)
            self._holdings.payloads[receipt.key] = payload
        self.state = outcome.state
        self._perform_all(outcome.effects)
        self._look_again(outcome.wake_at_s)
        self._on_event()
        return outcome.reply

    def _perform_all(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartMerge(order):
                self._start_merge(order)
            case Note():
                self.notes.append(effect)
            case _:
                if isinstance(effect, Publish) and self._late is not None:
                    old_BxN = self.published[effect.fragment].broadcast_BxN
                    self._late.superseded(effect.fragment, effect.version - 1, old_BxN)
                self._holdings.perform(effect)

    def _start_merge(self, order: MergeOrder) -> None:
        """Do the work now, and let it be done `merge_s` after the one before it."""
        payloads = self._holdings.payloads_of(order)
        event = self._holdings.merge(order, payloads, self.state.epoch)
        begins_s = max(self._clock.now_s, self._merger_free_at_s)
        self._merger_free_at_s = begins_s + self._merge_s
        self._clock.at(self._merger_free_at_s, Order.ARRIVAL, lambda: self._happen(event))

    def _happen(self, event: Event) -> None:
        self._handle(event, None)

    def _look_again(self, wake_at_s: float) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        if wake_at_s < math.inf:
            self._tick = self._clock.at(wake_at_s, Order.TIMER, lambda: self._happen(Tick()))

    def _tell_progress(self) -> None:
        self._holdings.send(None, membership.progress(self.state))
        self._clock.after(PROGRESS_EVERY_S, Order.TIMER, self._tell_progress)
