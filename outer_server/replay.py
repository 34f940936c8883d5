"""The tape, run again: from a snapshot and the events after it to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fragments.digest import digest_hex
from fragments.errors import RunDirectoryError
from fragments.payload import Payload
from fragments.records import Answered, ContributionKey, Receipt
from outer_server.core.events import (
    Contributed,
    Discard,
    Merged,
    Note,
    Publish,
    RollBack,
    Started,
)
from outer_server.core.scheduler import handle
from outer_server.core.state import RunState
from outer_server.holdings import Holdings
from outer_server.parameters import Parameters
from outer_server.store.snapshot import Restored
from outer_server.store.tape import DamagedTapeError, Record


class Replay:
    """A run on its way through the tape. `differences`: sentences, one for each version whose
    digest is another than the tape says, which happens on a processor of another kind.
    `unsettled`: those since which no server has begun an epoch with what came out here.

    Args:
        parameters: the tensors of `state`; changed by `apply`.
        state: where to begin.
        payloads: contributions that had arrived by then and were not merged.
        load: a snapshot by its name, for a tape that goes back to one; raises RunDirectoryError.
    """

    def __init__(
        self,
        parameters: Parameters,
        state: RunState,
        payloads: Mapping[ContributionKey, Payload],
        load: Callable[[str], Restored],
    ) -> None:
        self.state = state
        self.parameters = parameters
        self.holdings = Holdings(parameters, state, payloads)
        self._load = load
        self.differences: list[str] = []
        self._settled = 0
        self.merges = 0

    def apply(self, record: Record, payload: Payload | None) -> tuple[Note, ...]:
        """Let one event happen again; what it had to say for the log.

        Raises DamagedTapeError where it goes back to a snapshot that is missing or damaged.
        """
        event = record.event
        if isinstance(event, Merged):
            self._merge(event)
        layout_digest = self.parameters.layout.digest
        outcome = handle(self.state, event, record.at_s, layout_digest)
        is_new = isinstance(outcome.reply, Receipt) and not outcome.reply.duplicate
        if isinstance(event, Contributed) and is_new and payload is not None:
            self.holdings.payloads[event.meta.key] = payload
        if isinstance(event, RollBack) and isinstance(outcome.reply, Answered):
            self._go_back(event, outcome.state, record.number)
        self.state = outcome.state
        if isinstance(event, Started):
            self._begin(event)
        elif self.state.epoch != self.holdings.epoch:
            values = tuple(self.holdings.published)
            self.holdings.go_back(self.state, values, keeps=True)
            self.holdings.begin_again(values)
        for effect in outcome.effects:
            if isinstance(effect, Publish | Discard):
                self.holdings.perform(effect)
        return tuple(effect for effect in outcome.effects if isinstance(effect, Note))

    @property
    def unsettled(self) -> Sequence[str]:
        """See the class."""
        return self.differences[self._settled :]

    def digests(self) -> tuple[str, ...]:
        """Those of the values that came out here."""
        return tuple(digest_hex(values.broadcast_BxN) for values in self.holdings.published)

    def _begin(self, event: Started) -> None:
        if event.digests and event.digests != self.digests():
            self.differences.append(f"epoch {event.epoch} began with other values than are here")
        elif event.digests:
            self._settled = len(self.differences)
        self.holdings.renew(self.state, keeps=event.keeps)

    def _go_back(self, event: RollBack, state: RunState, number: int) -> None:
        try:
            fragments = self._load(event.point.snapshot).fragments
        except RunDirectoryError as error:
            raise DamagedTapeError(number - 1, str(error)) from error
        self.holdings.go_back(state, fragments)
        self.holdings.begin_again(fragments)

    def _merge(self, event: Merged) -> None:
        order, epoch = event.order, self.state.epoch
        if event.epoch not in (None, epoch):
            return  # It was under way while the run went back.
        self.merges += 1
        if event.refused is not None:
            self.holdings.stand(order, epoch, event.refused)
            return
        again = self.holdings.merge(order, self.holdings.payloads_of(order), epoch)
        if again.digest != event.digest:
            self.differences.append(
                f"fragment {event.fragment}, version {epoch}.{event.version}: {again.digest} here, "
                f"{event.digest} on the tape"
            )
