"""What the translations of every service share: enums, versions, leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from diloco.v1 import common_pb2
from fragments.errors import RefusedError
from fragments.records import Lease, Phase, RefusalCode, Version

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

PHASES = {
    Phase.WAITING: common_pb2.PHASE_WAITING,
    Phase.TRAINING: common_pb2.PHASE_TRAINING,
    Phase.CLOSING: common_pb2.PHASE_CLOSING,
    Phase.FINISHED: common_pb2.PHASE_FINISHED,
    Phase.DRAINING: common_pb2.PHASE_DRAINING,
}
REFUSALS = {
    RefusalCode.FENCED: common_pb2.REFUSAL_CODE_FENCED,
    RefusalCode.LEASE_LOST: common_pb2.REFUSAL_CODE_LEASE_LOST,
    RefusalCode.OLD_EPOCH: common_pb2.REFUSAL_CODE_OLD_EPOCH,
    RefusalCode.CONSUMED: common_pb2.REFUSAL_CODE_CONSUMED,
    RefusalCode.STALE: common_pb2.REFUSAL_CODE_STALE,
    RefusalCode.BAD_PAYLOAD: common_pb2.REFUSAL_CODE_BAD_PAYLOAD,
    RefusalCode.MISMATCH: common_pb2.REFUSAL_CODE_MISMATCH,
    RefusalCode.FULL: common_pb2.REFUSAL_CODE_FULL,
    RefusalCode.NOT_TRAINING: common_pb2.REFUSAL_CODE_NOT_TRAINING,
    RefusalCode.EVICTED: common_pb2.REFUSAL_CODE_EVICTED,
}


def known(names: Mapping[_Key, _Value], number: _Value, what: str) -> _Key:
    """The key whose value is `number`; RefusedError (MISMATCH) where there is none."""
    for key, value in names.items():
        if value == number:
            return key
    raise RefusedError(
        RefusalCode.MISMATCH,
        f"the other side says {what} {number}, which is not known here: update the older program",
    )


def same(source: object, record: type[Any], *but: str) -> dict[str, Any]:
    """The fields that `source` and `record` have under one name, but those named."""
    names = [field.name for field in fields(record) if field.name not in but]
    return {name: getattr(source, name) for name in names}


def version_to_wire(version: Version) -> common_pb2.Version:
    """Total; epoch and number must be in [0, 2^64)."""
    return common_pb2.Version(epoch=version.epoch, number=version.number)


def version_from_wire(wire: common_pb2.Version) -> Version:
    """An unset message is version 0.0."""
    return Version(wire.epoch, wire.number)


def lease_to_wire(lease: Lease) -> common_pb2.Lease:
    """Total; the token must be in [0, 2^64)."""
    return common_pb2.Lease(**same(lease, Lease))


def lease_from_wire(wire: common_pb2.Lease) -> Lease:
    """An unset message is the lease of nobody, which every server refuses."""
    return Lease(wire.learner, wire.token, wire.ttl_s)
