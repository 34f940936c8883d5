"""The run's status."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from diloco.v1 import status_pb2
from fragments.records import (
    EvaluationStatus,
    FragmentStatus,
    LearnerState,
    LearnerStatus,
    RunStatus,
)
from services.translate.words import PHASES, known, same

_Value = TypeVar("_Value")

_STATES = {
    LearnerState.JOINED: status_pb2.LEARNER_STATE_JOINED,
    LearnerState.TRAINING: status_pb2.LEARNER_STATE_TRAINING,
    LearnerState.LOST: status_pb2.LEARNER_STATE_LOST,
    LearnerState.LEFT: status_pb2.LEARNER_STATE_LEFT,
    LearnerState.EVICTED: status_pb2.LEARNER_STATE_EVICTED,
}


def status_to_wire(status: RunStatus) -> status_pb2.RunStatus:
    """The whole snapshot, lists included."""
    lists = ("fragments", "learners", "evaluations")
    return status_pb2.RunStatus(
        phase=PHASES[status.phase],
        fragments=_each(status_pb2.FragmentStatus, FragmentStatus, status.fragments),
        learners=[
            status_pb2.LearnerStatus(
                state=_STATES[learner.state], **same(learner, LearnerStatus, "state")
            )
            for learner in status.learners
        ],
        evaluations=_each(status_pb2.EvaluationStatus, EvaluationStatus, status.evaluations),
        **same(status, RunStatus, "phase", *lists),
    )


def status_from_wire(wire: status_pb2.RunStatus) -> RunStatus:
    """The inverse. RefusedError (MISMATCH) for an unknown phase or state."""
    lists = ("fragments", "learners", "evaluations")
    return RunStatus(
        phase=known(PHASES, wire.phase, "phase"),
        fragments=tuple(_each(FragmentStatus, FragmentStatus, wire.fragments)),
        learners=tuple(
            LearnerStatus(
                state=known(_STATES, learner.state, "learner state"),
                **same(learner, LearnerStatus, "state"),
            )
            for learner in wire.learners
        ),
        evaluations=tuple(_each(EvaluationStatus, EvaluationStatus, wire.evaluations)),
        **same(wire, RunStatus, "phase", *lists),
    )


def _each(target: type[_Value], record: type[Any], sources: Iterable[object]) -> list[_Value]:
    return [target(**same(source, record)) for source in sources]
