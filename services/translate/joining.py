"""Describing the run, and joining it."""

from __future__ import annotations

from diloco.v1 import common_pb2, control_pb2
from fragments.records import HeldBase, Hello, Role, RunDescription, Welcome
from services.translate.words import (
    PHASES,
    known,
    lease_from_wire,
    lease_to_wire,
    same,
    version_from_wire,
    version_to_wire,
)

_ROLES = {
    Role.LEARNER: common_pb2.ROLE_LEARNER,
    Role.EVALUATOR: common_pb2.ROLE_EVALUATOR,
}


def description_to_wire(run: RunDescription) -> control_pb2.DescribeRunResponse:
    """What DescribeRun answers."""
    return control_pb2.DescribeRunResponse(
        phase=PHASES[run.phase], **same(run, RunDescription, "phase")
    )


def description_from_wire(wire: control_pb2.DescribeRunResponse) -> RunDescription:
    """The inverse. RefusedError (MISMATCH) for an unknown phase."""
    phase = known(PHASES, wire.phase, "phase")
    return RunDescription(phase=phase, **same(wire, RunDescription, "phase"))


def hello_to_wire(hello: Hello) -> control_pb2.JoinRequest:
    """A request to join."""
    bases = [
        control_pb2.HeldBase(
            version=version_to_wire(base.version), **same(base, HeldBase, "version")
        )
        for base in hello.bases
    ]
    shared = same(hello, Hello, "role", "bases")
    return control_pb2.JoinRequest(role=_ROLES[hello.role], bases=bases, **shared)


def hello_from_wire(wire: control_pb2.JoinRequest) -> Hello:
    """The inverse. RefusedError (MISMATCH) for an unknown role."""
    bases = tuple(
        HeldBase(version=version_from_wire(base.version), **same(base, HeldBase, "version"))
        for base in wire.bases
    )
    role = known(_ROLES, wire.role, "role")
    return Hello(role=role, bases=bases, **same(wire, Hello, "role", "bases"))


def welcome_to_wire(welcome: Welcome) -> control_pb2.JoinResponse:
    """The answer to a join; `consumed` travels plus one, since -1 has no unsigned form."""
    return control_pb2.JoinResponse(
        lease=lease_to_wire(welcome.lease),
        phase=PHASES[welcome.phase],
        consumed_plus_one=[number + 1 for number in welcome.consumed],
        **same(welcome, Welcome, "lease", "phase", "consumed"),
    )


def welcome_from_wire(wire: control_pb2.JoinResponse) -> Welcome:
    """The inverse. RefusedError (MISMATCH) for an unknown phase."""
    return Welcome(
        lease=lease_from_wire(wire.lease),
        phase=known(PHASES, wire.phase, "phase"),
        versions=tuple(wire.versions),
        consumed=tuple(number - 1 for number in wire.consumed_plus_one),
        **same(wire, Welcome, "lease", "phase", "versions", "consumed"),
    )
