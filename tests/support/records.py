"""Records of learners as tests of single rules need them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fragments.records import Report, Role
from outer_server.core.state import Base, LearnerRecord


def learner_record(name: str, **changes: Any) -> LearnerRecord:
    """A live learner that holds nothing of two fragments, with `changes`."""
    record = LearnerRecord(
        name=name,
        role=Role.LEARNER,
        token=1,
        incarnation=name,
        shard_index=0,
        live=True,
        left=False,
        position=0,
        report=Report(0, 0, 0),
        heard_at_s=0.0,
        bases=(Base(), Base()),
    )
    return replace(record, **changes)
