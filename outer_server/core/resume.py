"""The state with which a server goes on after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fragments.records import ContributionKey, Phase, Version
from outer_server.core.membership import ended
from outer_server.core.state import (
    Base,
    ContributionMeta,
    FragmentState,
    LearnerRecord,
    RunState,
)

TOKEN_BITS = 32
"""A generation grants fewer leases than 2 to this power."""


def resume(
    state: RunState,
    generation: int,
    epoch: int,
    digests: Sequence[str] = (),
    *,
    keeps: bool = False,
) -> RunState:
    """`state` as loaded, made ready to go on under a new server generation.

    Open rounds end, and what had arrived for them waits for the next. Times
    start afresh at 0: every live lease runs anew, so that nobody is lost who comes
    back within it, and so does the time of an eviction.

    A larger `epoch` says that the snapshot may be older than what was published:
    every base is void, and what was trained since counts neither for the run nor for its
    budget. `digests` are those of the fragments as they are, where they are others than `state`
    tells of. Where they are not, `keeps` says that contributions that wait are kept; who joins
    again has still handed in what it has.
    """
    # Tokens only rise, also over joins that the snapshot does not know of.
    token = max(state.next_token, generation << TOKEN_BITS)
    state = replace(state, generation=generation, next_token=token, due=(), stopping=False)
    state = replace(state, closing_until_s=0.0, stepped_at_s=None)
    again = {name: replace(each, since_s=0.0) for name, each in state.evicted.items()}
    state = replace(state, evicted=again)
    if state.phase is not Phase.FINISHED:
        phase = Phase.DRAINING if state.held else Phase.WAITING
        reason = state.held or "the server was restarted"
        state = replace(state, phase=phase, phase_reason=reason)
    fragments = tuple(_parked(fragment) for fragment in state.fragments)
    if digests:
        pairs = zip(fragments, digests, strict=True)
        fragments = tuple(replace(fragment, digest=digest) for fragment, digest in pairs)
    learners = {name: _waiting(record) for name, record in state.learners.items()}
    if epoch == state.epoch:
        return replace(state, fragments=fragments, learners=learners)
    voided = {name: void(record, len(fragments), keeps=keeps) for name, record in learners.items()}
    return replace(
        state,
        epoch=epoch,
        fragments=tuple(_renamed(fragment, epoch, keeps=keeps) for fragment in fragments),
        learners={name: replace(record, live=False) for name, record in voided.items()},
    )


def renamed(key: ContributionKey, epoch: int) -> ContributionKey:
    """The same contribution in another epoch that began with the same values."""
    return replace(key, base_version=Version(epoch, key.base_version.number))


def begin_epoch(state: RunState, epoch: int, reason: str) -> RunState:
    """`state` in a new epoch of the same server: values, counters and contributions that wait stay;
    every lease and base is void.
    """
    held = state.held
    return replace(
        state,
        epoch=epoch,
        due=(),
        closing_until_s=0.0,
        stepped_at_s=None,
        phase=Phase.DRAINING if held else Phase.WAITING,
        phase_reason=held or reason,
        fragments=tuple(_renamed(_parked(each), epoch, keeps=True) for each in state.fragments),
        learners={
            name: void(ended(record), len(state.fragments), keeps=True)
            for name, record in state.learners.items()
        },
    )


def void(record: LearnerRecord, num_fragments: int, *, keeps: bool = False) -> LearnerRecord:
    """A record of which nothing that it holds, and nothing that it has trained since, counts; with
    `keeps` what it has handed in does, once.
    """
    bases = (Base(),) * num_fragments
    if keeps:
        bases = tuple(
            Base(consumed=b.consumed, consumed_payload=b.consumed_payload, dropped=b.dropped)
            for b in record.bases
        )
    return replace(record, starts_count=True, bases=bases)


def _renamed(fragment: FragmentState, epoch: int, *, keeps: bool) -> FragmentState:
    def named(meta: ContributionMeta) -> ContributionMeta:
        return replace(meta, key=renamed(meta.key, epoch))

    # Whatever has an earlier version of another epoch's can contribute nothing any more.
    return replace(fragment, arrived=tuple(map(named, fragment.arrived)) if keeps else (), past=())


def _parked(fragment: FragmentState) -> FragmentState:
    fragment = replace(fragment, closed_at_s=None)
    if fragment.round is None:
        return fragment
    order = fragment.round.order
    taken = order.contributions if order is not None else ()
    return replace(fragment, round=None, arrived=(*taken, *fragment.arrived))


def _waiting(record: LearnerRecord) -> LearnerRecord:
    bases = tuple(replace(base, asked_version=-1, asked_at_s=0.0) for base in record.bases)
    return replace(record, heard_at_s=0.0, stepped_at_s=None, has_stepped=False, bases=bases)
