"""Contributions up and updates down. Payload bytes travel in chunks, so they are apart."""

from __future__ import annotations

from diloco.v1 import common_pb2, pull_pb2, push_pb2
from fragments.payload import Payload
from fragments.records import Contribution, ContributionKey, Lease, Receipt, Refusal, Update
from services.errors import MESSAGE_CHARS
from services.translate.words import (
    REFUSALS,
    known,
    lease_to_wire,
    version_from_wire,
    version_to_wire,
)


def payload_to_wire(payload: Payload) -> common_pb2.PayloadHeader:
    """The payload's header; its bytes travel in chunks."""
    return common_pb2.PayloadHeader(
        codec=payload.codec,
        wire_bytes=len(payload.data),
        raw_bytes=payload.raw_size,
        crc32c=payload.crc32c,
    )


def payload_from_wire(wire: common_pb2.PayloadHeader, data: bytes) -> Payload:
    """The payload that `wire` announced, from its assembled bytes, not yet checked."""
    return Payload(codec=wire.codec, raw_size=wire.raw_bytes, crc32c=wire.crc32c, data=data)


def key_to_wire(key: ContributionKey, run_id: str) -> push_pb2.ContributionKey:
    """The learner is not in it: it is the lease's."""
    version = version_to_wire(key.base_version)
    return push_pb2.ContributionKey(run_id=run_id, fragment=key.fragment, base_version=version)


def key_from_wire(wire: push_pb2.ContributionKey, learner: str) -> ContributionKey:
    """The inverse, for the learner that holds the lease."""
    return ContributionKey(learner, wire.fragment, version_from_wire(wire.base_version))


_PLAIN = ("steps", "tokens", "cursor_from", "cursor_to", "base_digest")


def contribution_to_wire(
    contribution: Contribution, lease: Lease, run_id: str, layout_digest: str, offset: int
) -> push_pb2.PushHeader:
    """The header of a push whose chunks begin at byte `offset`."""
    return push_pb2.PushHeader(
        lease=lease_to_wire(lease),
        key=key_to_wire(contribution.key, run_id),
        layout_digest=layout_digest,
        asked_version=version_to_wire(contribution.asked_version),
        payload=payload_to_wire(contribution.payload),
        offset=offset,
        **{name: getattr(contribution, name) for name in _PLAIN},
    )


def contribution_from_wire(wire: push_pb2.PushHeader, data: bytes) -> Contribution:
    """The inverse, with the assembled bytes; the learner is the lease's."""
    return Contribution(
        key=key_from_wire(wire.key, wire.lease.learner),
        asked_version=version_from_wire(wire.asked_version),
        payload=payload_from_wire(wire.payload, data),
        **{name: getattr(wire, name) for name in _PLAIN},
    )


def outcome_to_wire(
    outcome: Receipt | Refusal, run_id: str, generation: int
) -> push_pb2.PushResponse:
    """What Push answers."""
    if isinstance(outcome, Refusal):
        # A caller's own text may be part of it.
        reason = outcome.reason[:MESSAGE_CHARS]
        refusal = push_pb2.Refusal(code=REFUSALS[outcome.code], reason=reason)
        return push_pb2.PushResponse(refusal=refusal, generation=generation)
    receipt = push_pb2.Receipt(
        key=key_to_wire(outcome.key, run_id), duplicate=outcome.duplicate, late=outcome.late
    )
    return push_pb2.PushResponse(receipt=receipt, generation=generation)


def outcome_from_wire(wire: push_pb2.PushResponse, learner: str) -> Receipt | Refusal:
    """The inverse. RefusedError (MISMATCH) for an unknown refusal code."""
    if wire.WhichOneof("outcome") == "receipt":
        receipt = wire.receipt
        return Receipt(key_from_wire(receipt.key, learner), receipt.duplicate, receipt.late)
    return Refusal(known(REFUSALS, wire.refusal.code, "refusal code"), wire.refusal.reason)


def update_to_wire(update: Update, generation: int) -> pull_pb2.UpdateHeader:
    """The header of one update down."""
    base = update.from_version
    return pull_pb2.UpdateHeader(
        fragment=update.fragment,
        version=version_to_wire(update.version),
        from_version=None if base is None else version_to_wire(base),
        digest=update.digest,
        payload=payload_to_wire(update.payload),
        generation=generation,
    )


def update_from_wire(wire: pull_pb2.UpdateHeader, data: bytes) -> Update:
    """The inverse, with the assembled bytes."""
    return Update(
        fragment=wire.fragment,
        version=version_from_wire(wire.version),
        from_version=version_from_wire(wire.from_version)
        if wire.HasField("from_version")
        else None,
        digest=wire.digest,
        payload=payload_from_wire(wire.payload, data),
    )
