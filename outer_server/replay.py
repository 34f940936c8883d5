"""The tape, run again: from a snapshot and the events after it to the same bits."""

from __future__ import annotations

from collections.abc import Mapping

from fragments.payload import Payload
from fragments.records import ContributionKey, Receipt
from outer_server.core.events import Contributed, Discard, Merged, Note, Publish, Started
from outer_server.core.scheduler import handle
from outer_server.core.state import RunState
from outer_server.holdings import Holdings
from outer_server.parameters import Parameters
from outer_server.store.tape import Record


class Replay:
    """A run on its way through the tape. `differences`: sentences, one for each version whose
    digest is another than the tape says, which happens on a processor of another kind.

    Args:
        parameters: the tensors of `state`; changed by `apply`.
        state: where to begin.
        payloads: contributions that had arrived by then and were not merged.
    """

    def __init__(
        self,
        parameters: Parameters,
        state: RunState,
        payloads: Mapping[ContributionKey, Payload],
    ) -> None:
        self.state = state
        self.parameters = parameters
        self.holdings = Holdings(parameters, state, payloads)
        self.differences: list[str] = []
        self.merges = 0

    def apply(self, record: Record, payload: Payload | None) -> tuple[Note, ...]:
        """Let one event happen again; what it had to say for the log."""
        event = record.event
        if isinstance(event, Merged):
            self._merge(event)
        layout_digest = self.parameters.layout.digest
        outcome = handle(self.state, event, record.at_s, layout_digest)
        is_new = isinstance(outcome.reply, Receipt) and not outcome.reply.duplicate
        if isinstance(event, Contributed) and is_new and payload is not None:
            self.holdings.payloads[event.meta.key] = payload
        self.state = outcome.state
        if isinstance(event, Started):
            self.holdings.renew(self.state)
        for effect in outcome.effects:
            if isinstance(effect, Publish | Discard):
                self.holdings.perform(effect)
        return tuple(effect for effect in outcome.effects if isinstance(effect, Note))

    def _merge(self, event: Merged) -> None:
        self.merges += 1
        order, epoch = event.order, self.state.epoch
        if event.refused is not None:
            self.holdings.stand(order, epoch, event.refused)
            return
        again = self.holdings.merge(order, self.holdings.payloads_of(order), epoch)
        if again.digest != event.digest:
            self.differences.append(
                f"fragment {event.fragment}, version {epoch}.{event.version}: {again.digest} here, "
                f"{event.digest} on the tape"
            )
