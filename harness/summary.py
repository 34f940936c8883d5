"""What a run came to: `summary.json`, its table, and the verdicts on it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from fragments.errors import DilocoError
from fragments.records import Phase
from harness.processes import Event, EventKind
from harness.recorder import Recorder, begin_s

SUMMARY_VERSION = 1
WAIT_SHARE_BOUND = 0.01
"""Largest share of a learner's time that synchronisation may take."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LearnerSummary(_Record):
    """One learner over the whole run; counters are sums over its joins."""

    name: str
    steps: int
    tokens: int
    contributions_merged: int
    tokens_merged: int
    contributions_late: int
    contributions_refused: int
    wait_share: float = Field(description="share of its time spent waiting for synchronisation")
    step_s: float = Field(
        description="smoothed seconds between two steps, at its last step; 0 where it made none"
    )
    digest: str = Field(description="of the broadcast copies it ended with")
    joins: int
    restarts: int
    pace_s: float = Field(description="least seconds a step was made to take, 0 for unpaced")


class EventSummary(_Record):
    """One thing that happened to a process."""

    at_s: float = Field(description="seconds since the run command began")
    name: str
    kind: str
    exit_code: int | None
    detail: str


class LossPoint(_Record):
    """One held-out evaluation of the global weights."""

    tokens: int
    global_step: int
    loss: float
    at_s: float = Field(description="seconds since the run command began, as of events")


class Summary(_Record):
    """A finished run. Losses are held-out losses in `loss_unit`."""

    version: int = SUMMARY_VERSION
    run_id: str
    finished: bool
    loss_first: float | None = Field(description="None where nobody evaluated")
    loss_last: float | None
    loss_unit: str
    loss_bigram: float | None = Field(
        default=None, description="of a bigram model of the training bytes"
    )
    loss_alone: float | None = Field(
        default=None, description="of one learner alone, on a learner's share of the tokens"
    )
    alone_tokens: int = 0
    alone_wall_s: float = 0.0
    tokens: int = Field(description="trained by all learners")
    tokens_merged: int
    rounds: int = Field(description="merged rounds")
    rounds_abandoned: int
    global_step: int
    learners: tuple[LearnerSummary, ...]
    bytes_up: int
    bytes_down: int
    wall_s: float = Field(description="of the run itself: first step to finished")
    total_s: float = Field(description="with the processes' start and end, and the baselines")
    weights_digest: str
    digests_equal: bool
    restarts: int
    events: tuple[EventSummary, ...]
    evaluations: tuple[LossPoint, ...]

    def write(self, path: Path) -> None:
        """Writes it as JSON, in one move: a reader never sees half of it."""
        part = path.with_suffix(".part")
        part.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        part.replace(path)

    @staticmethod
    def read(path: Path) -> Summary:
        """Reads what `write` wrote."""
        return Summary.model_validate_json(path.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the status does not know of a local run.

    `paces_s` and `restarts` are by learner; `total_s` runs from the first process's start.
    """

    paces_s: Mapping[str, float]
    restarts: Mapping[str, int]
    events: Sequence[Event]
    total_s: float


def summarize(recorder: Recorder, circumstances: Circumstances) -> Summary:
    """The summary of what was recorded, without baselines.

    Raises:
        DilocoError: when no snapshot was recorded.
    """
    last = recorder.last
    if last is None:
        raise DilocoError("the run gave no status, so there is nothing to sum up")
    evaluations = recorder.evaluations
    learners = tuple(
        LearnerSummary(
            name=one.name,
            steps=one.steps,
            tokens=one.tokens,
            contributions_merged=one.contributions_merged,
            tokens_merged=one.tokens_merged,
            contributions_late=one.contributions_late,
            contributions_refused=one.contributions_refused,
            wait_share=one.wait_share,
            step_s=recorder.steps_s.get(one.name, 0.0),
            digest=one.weights_digest,
            joins=one.joins,
            restarts=circumstances.restarts.get(one.name, 0),
            pace_s=circumstances.paces_s.get(one.name, 0.0),
        )
        for one in last.learners
    )
    return Summary(
        run_id=last.run_id,
        finished=last.phase is Phase.FINISHED,
        loss_first=evaluations[0].loss if evaluations else None,
        loss_last=evaluations[-1].loss if evaluations else None,
        loss_unit=evaluations[-1].unit if evaluations else "",
        tokens=last.tokens_trained,
        tokens_merged=last.tokens_merged,
        rounds=last.rounds_merged,
        rounds_abandoned=last.rounds_abandoned,
        global_step=last.global_step,
        learners=learners,
        bytes_up=last.bytes_up,
        bytes_down=last.bytes_down,
        wall_s=_wall_s(recorder),
        total_s=round(circumstances.total_s, 3),
        weights_digest=last.weights_digest,
        digests_equal=bool(learners) and all(one.digest == last.weights_digest for one in learners),
        restarts=sum(circumstances.restarts.values()),
        events=tuple(
            EventSummary(
                at_s=one.at_s,
                name=one.name,
                kind=one.kind.value,
                exit_code=one.exit_code,
                detail=one.detail,
            )
            for one in circumstances.events
        ),
        evaluations=tuple(
            LossPoint(
                tokens=one.tokens_trained,
                global_step=one.global_step,
                loss=one.loss,
                at_s=round(recorder.server_began_s + one.at_s, 3),
            )
            for one in evaluations
        ),
    )


def _wall_s(recorder: Recorder) -> float:
    """From the last snapshot before anybody's first step to the first with the last progress."""
    samples = recorder.samples
    final = samples[-1].tokens_merged
    end_s = next(sample.at_s for sample in samples if sample.tokens_merged == final)
    return round(max(0.0, end_s - begin_s(samples)), 3)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim about a run, whether it holds, and the figures. `vital`: else the run failed."""

    claim: str
    holds: bool
    figures: str
    vital: bool = False


def verdicts(summary: Summary) -> list[Verdict]:
    """What the figures say, claim by claim; baselines that were not computed are left out."""
    unit = summary.loss_unit
    found = [
        Verdict(
            "the weights are the same at the server and at every learner",
            summary.digests_equal,
            summary.weights_digest[:16],
            vital=True,
        ),
        Verdict(
            "every learner contributed",
            all(one.contributions_merged > 0 for one in summary.learners),
            ", ".join(f"{one.name} {one.contributions_merged}" for one in summary.learners),
            vital=True,
        ),
        Verdict(
            f"no learner waited for more than {WAIT_SHARE_BOUND:.0%} of its time",
            all(one.wait_share <= WAIT_SHARE_BOUND for one in summary.learners),
            ", ".join(f"{one.name} {one.wait_share:.2%}" for one in summary.learners),
        ),
    ]
    for claim, other in (
        ("the loss is below that of a bigram model", summary.loss_bigram),
        ("the loss is below that of one learner alone", summary.loss_alone),
    ):
        if other is not None and summary.loss_last is not None:
            figures = f"{summary.loss_last:.3f} against {other:.3f} {unit}"
            found.append(Verdict(claim, summary.loss_last < other, figures))
    return found + _returns(summary)


def _returns(summary: Summary) -> list[Verdict]:
    """One verdict for each death of a learner: has it come back?"""
    names = {one.name for one in summary.learners}
    deaths = [e for e in summary.events if e.kind == EventKind.DIED.value and e.name in names]
    found = []
    for death in deaths:
        after = [e for e in summary.events if e.name == death.name and e.at_s > death.at_s]
        # One that died before it ever joined does not join again, but it ends well.
        back = [e for e in after if e.kind in (EventKind.REJOINED.value, EventKind.ENDED.value)]
        how = "kill -9" if death.exit_code == -signal.SIGKILL else f"exit code {death.exit_code}"
        figures = f"died at {death.at_s:.1f} s"
        if back:
            figures += f", back after {back[0].at_s - death.at_s:.1f} s"
        found.append(Verdict(f"{death.name} rejoined after its {how}", bool(back), figures, True))
    return found
