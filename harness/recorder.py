"""The history of a run, from the snapshots that its status gives: bounded, and enough to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fragments.records import EvaluationStatus, LearnerState, LearnerStatus, RunStatus

MAX_SAMPLES = 4000
"""Beyond this every second sample is dropped, so that a long run costs bounded memory."""


@dataclass(frozen=True, slots=True)
class LearnerSample:
    """One learner at one moment; all counters are sums over its joins."""

    steps: int
    tokens_merged: int
    contributions_merged: int
    state: LearnerState


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of the run, `at_s` seconds on the watcher's clock."""

    at_s: float
    global_step: int
    tokens_trained: int
    tokens_merged: int
    learners: dict[str, LearnerSample]


@dataclass(slots=True)
class Recorder:
    """Takes snapshots in order of time; keeps all evaluations, though a status holds few."""

    samples: list[Sample] = field(default_factory=list)
    last: RunStatus | None = None
    server_began_s: float = 0.0
    """Start of the server on the watcher's clock: what times in its status count from."""
    steps_s: dict[str, float] = field(default_factory=dict)
    """By learner, the last time of a step that it told of. One that has joined again tells of none
    until it has made a step."""
    _evaluations: dict[tuple[str, float, int], EvaluationStatus] = field(default_factory=dict)

    def record(self, status: RunStatus, at_s: float) -> list[LearnerStatus]:
        """Takes one snapshot and returns the learners that have joined again since the last one."""
        rejoined = self._rejoined(status)
        for evaluation in status.evaluations:
            key = (evaluation.evaluator, evaluation.at_s, evaluation.global_step)
            self._evaluations[key] = evaluation
        # What is late is the answer, never the question: the least difference is nearest.
        began_s = at_s - status.uptime_s
        self.server_began_s = began_s if self.last is None else min(self.server_began_s, began_s)
        self.samples.append(
            Sample(
                at_s,
                status.global_step,
                status.tokens_trained,
                status.tokens_merged,
                {learner.name: _sample(learner) for learner in status.learners},
            )
        )
        told = {one.name: one.step_s for one in status.learners if one.step_s > 0}
        self.steps_s.update(told)
        if len(self.samples) > MAX_SAMPLES:
            self.samples = self.samples[::2]
        self.last = status
        return rejoined

    @property
    def evaluations(self) -> list[EvaluationStatus]:
        """All evaluations seen so far, oldest first."""
        return sorted(self._evaluations.values(), key=lambda one: (one.tokens_trained, one.at_s))

    def _rejoined(self, status: RunStatus) -> list[LearnerStatus]:
        before = {one.name: one.joins for one in self.last.learners} if self.last else {}
        return [one for one in status.learners if one.joins > max(1, before.get(one.name, 1))]


def begin_s(samples: Sequence[Sample]) -> float:
    """When training began: the last sample before anybody's first step, 0 for no sample."""
    if not samples:
        return 0.0
    before = [sample.at_s for sample in samples if sample.tokens_trained == 0]
    return before[-1] if before else samples[0].at_s


def _sample(learner: LearnerStatus) -> LearnerSample:
    return LearnerSample(
        learner.steps, learner.tokens_merged, learner.contributions_merged, learner.state
    )
