"""Status snapshots of a small made-up run."""

from __future__ import annotations

from typing import Any

from fragments.records import (
    EvaluationStatus,
    FragmentStatus,
    LearnerState,
    LearnerStatus,
    Phase,
    RunStatus,
)

DIGEST = "ab" * 32
NAMES = ("asia-slow", "eu-west", "us-east")


def learner(name: str, steps: int, **changes: Any) -> LearnerStatus:
    """A learner that has made `steps` steps and had half of their tokens merged."""
    fields: dict[str, Any] = {
        "name": name,
        "state": LearnerState.TRAINING,
        "token": 1,
        "position": steps,
        "steps": steps,
        "tokens": 1024 * steps,
        "cursor": steps,
        "joins": 1,
        "contributions_merged": steps // 8,
        "tokens_merged": 512 * steps,
        "contributions_late": 0,
        "contributions_refused": 0,
        "staleness": 0,
        "silent_s": 0.1,
        "step_s": 0.22,
        "wait_share": 0.002,
        "loss": 3.0,
        "bytes_up": 1000 * steps,
        "bytes_down": 2000 * steps,
        "weights_digest": DIGEST,
    }
    return LearnerStatus(**(fields | changes))


def evaluation(step: int, loss: float) -> EvaluationStatus:
    """A held-out loss at a global step."""
    return EvaluationStatus(loss, "bits per byte", step, 2048 * step, float(step), "evaluator")


def status(step: int, **changes: Any) -> RunStatus:
    """The run at a global step; two fast learners and one that is three times slower."""
    learners = (
        learner("asia-slow", step // 3),
        learner("eu-west", step),
        learner("us-east", step),
    )
    fields: dict[str, Any] = {
        "run_id": "made-up",
        "phase": Phase.TRAINING,
        "phase_reason": "",
        "generation": 1,
        "epoch": 0,
        "global_step": step,
        "tokens_trained": sum(one.tokens for one in learners),
        "tokens_pushed": 0,
        "tokens_merged": sum(one.tokens_merged for one in learners),
        "tokens_budget": 240_000,
        "rounds_merged": step // 4,
        "rounds_abandoned": 0,
        "uptime_s": 0.2 * step,
        "tokens_per_s": 9000.0,
        "bytes_up": 10_000 * step,
        "bytes_down": 20_000 * step,
        "sync_interval_steps": 8,
        "weights_digest": DIGEST,
        "fragments": (
            FragmentStatus(0, step // 8, DIGEST, 1000, False, 0, 0),
            FragmentStatus(1, step // 8, DIGEST, 1000, True, 3, 1),
        ),
        "learners": learners,
        "evaluations": (evaluation(step, 8.0 - step / 20),),
    }
    return RunStatus(**(fields | changes))
