"""What a run holds beside its state: payloads that wait, merged values, published ones, and the
way to each learner. Whoever runs the scheduler has its effects performed here; when a merge is done
and where a note is written is left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fragments.errors import NonFiniteError, PayloadError
from fragments.payload import Payload
from fragments.records import ContributionKey, Goodbye, ServerNote, Update
from outer_server.core import membership
from outer_server.core.events import Discard, Disconnect, Merged, Publish, Send
from outer_server.core.resume import renamed
from outer_server.core.state import MergeOrder, RunState
from outer_server.core.step import FragmentParameters
from outer_server.parameters import Parameters
from outer_server.publications import Publications

Sink = Callable[[ServerNote], None]

Performed = Send | Publish | Discard | Disconnect
"""Effects that are performed here, in no time."""


class Holdings:
    """Not thread-safe, except that one other thread may call `merge`, `stand` and `begin_again`,
    and any thread may read `publications`.

    Args:
        parameters: the tensors; changed by `merge` alone.
        state: whose fragments are published as they are.
        payloads: contributions that have arrived and are not merged yet.
    """

    def __init__(
        self,
        parameters: Parameters,
        state: RunState,
        payloads: Mapping[ContributionKey, Payload] | None = None,
    ) -> None:
        self.published: list[FragmentParameters] = list(parameters.fragments)
        self.payloads: dict[ContributionKey, Payload] = dict(payloads or {})
        self.sinks: dict[str, Sink] = {}
        self.publications = Publications(parameters.full)
        self._parameters = parameters
        self._results: dict[tuple[int, int], tuple[Update, FragmentParameters]] = {}
        self._epoch = 0
        self.renew(state)

    @property
    def epoch(self) -> int:
        """That of what is published."""
        return self._epoch

    def renew(self, state: RunState, *, keeps: bool = False) -> None:
        """Go on under a new server. In a new epoch no update leads from an old version to one of
        it, and contributions to the old ones are let go of, unless it `keeps` them.
        """
        if state.epoch == self._epoch:
            return
        if self._epoch:
            old = self.payloads if keeps else {}
            self.payloads = {renamed(key, state.epoch): each for key, each in old.items()}
        self._epoch = state.epoch
        for index, fragment in enumerate(state.fragments):
            version = membership.version_of(state, index)
            broadcast = self.published[index].broadcast_BxN
            self.publications.reset(index, version, fragment.digest, broadcast)

    def go_back(
        self, state: RunState, fragments: Sequence[FragmentParameters], *, keeps: bool = False
    ) -> None:
        """Publish these values, in the new epoch of `state`; nothing of the old one is left but
        what merges of it may still bring (see `begin_again`) and, where it `keeps` them,
        contributions that wait.
        """
        self.published = list(fragments)
        self.renew(state, keeps=keeps)

    def begin_again(self, fragments: Sequence[FragmentParameters]) -> None:
        """Merge on from these values; for the thread that merges. What it merged before and was
        not published is let go of.
        """
        self._parameters.fragments = tuple(fragments)
        self._results.clear()

    def attach(self, learner: str, sink: Sink) -> None:
        """A learner's control stream is open; an older one is told that it was replaced."""
        old = self.sinks.get(learner)
        self.sinks[learner] = sink
        if old is not None:
            old(Goodbye(None, "a newer control stream of this lease replaced this one"))

    def detach(self, learner: str, sink: Sink | None = None) -> None:
        """A control stream ended; with `sink`, only if no newer one has replaced that."""
        if sink is None or self.sinks.get(learner) is sink:
            self.sinks.pop(learner, None)

    def send(self, learner: str | None, note: ServerNote) -> None:
        """To one learner, where it has a stream, or to all that have one (None)."""
        sinks = list(self.sinks.values()) if learner is None else [self.sinks.get(learner)]
        for sink in sinks:
            if sink is not None:
                sink(note)

    def perform(self, effect: Performed) -> None:
        """Do what the scheduler wants done."""
        match effect:
            case Send(learner, note):
                self.send(learner, note)
            case Publish(fragment, version):
                self.put_out(*self._results.pop((fragment, version)))
            case Discard(keys):
                for key in keys:
                    self.payloads.pop(key, None)
            case Disconnect(learner, note):
                sink = self.sinks.pop(learner, None)
                if sink is not None:
                    sink(note)

    def put_out(self, update: Update, parameters: FragmentParameters) -> None:
        """Publish a new version of a fragment."""
        self.published[update.fragment] = parameters
        self.publications.publish(update, parameters.broadcast_BxN)

    def payloads_of(self, order: MergeOrder) -> dict[ContributionKey, Payload]:
        """Those that a merge takes."""
        return {meta.key: self.payloads[meta.key] for meta in order.contributions}

    def merge(
        self, order: MergeOrder, payloads: Mapping[ContributionKey, Payload], epoch: int
    ) -> Merged:
        """Do a merge and keep its result until it is published. One that is refused, for a payload
        or for what comes out, gives the next version with the value of the last.
        """
        try:
            result = self._parameters.apply(order, payloads, epoch)
        except (PayloadError, NonFiniteError) as error:
            return self.stand(order, epoch, str(error))
        return self._merged(order, result, None)

    def stand(self, order: MergeOrder, epoch: int, reason: str) -> Merged:
        """The next version with the value of the last, for a merge that cannot be done."""
        return self._merged(order, self._parameters.stand(order, epoch), reason)

    def _merged(
        self, order: MergeOrder, result: tuple[Update, FragmentParameters], refused: str | None
    ) -> Merged:
        update = result[0]
        self._results[order.fragment, update.version.number] = result
        version = update.version
        return Merged(order.fragment, version.number, update.digest, order, refused, version.epoch)
