"""Learners against a real outer server in one process: the whole path but the network."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fragments.records import LearnerState, Phase
from learner.evaluate import Evaluator
from learner.run import Learner, Outcome
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from tests.support.direct import DirectLink
from tests.support.tiny import TinyProgram, tiny_birth, tiny_spec


def _learn(server: OuterServer, name: str, pace_s: float) -> Outcome:
    link = DirectLink(server)
    learner = Learner(name, TinyProgram(), link, link.describe(), pace_s)
    return learner.run(threading.Event())


def test_three_learners_train_to_the_budget_and_end_on_the_same_bits(tmp_path: Path) -> None:
    # A run of a few dozen rounds: a high momentum would still be swinging at its end.
    spec = tiny_spec(min_learners=3, outer={"learning_rate": 0.7, "momentum": 0.3})
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with OuterServer(tmp_path / "run") as server, ThreadPoolExecutor(4) as pool:
        link = DirectLink(server)
        evaluator = Evaluator("judge", TinyProgram(), link, link.describe(), every_s=0.05)
        judged = pool.submit(evaluator.run, threading.Event())
        ends = [
            pool.submit(_learn, server, name, pace_s)
            for name, pace_s in [("a", 0.004), ("b", 0.004), ("slow", 0.012)]
        ]
        outcomes = [end.result(60) for end in ends]
        last = judged.result(60)
        status = server.status()

    assert all(outcome.finished for outcome in outcomes)
    assert status.phase is Phase.FINISHED
    assert {outcome.weights_digest for outcome in outcomes} == {status.weights_digest}
    assert {learner.weights_digest for learner in status.learners} == {status.weights_digest}
    assert all(learner.state is LearnerState.LEFT for learner in status.learners)
    assert all(learner.contributions_merged > 0 for learner in status.learners)
    assert status.tokens_trained >= spec.budget_tokens
    assert status.tokens_trained == sum(outcome.tokens for outcome in outcomes)
    assert last is not None
    first = status.evaluations[0].loss
    assert last.loss == status.evaluations[-1].loss < 0.02 * first


def test_synchronous_diloco_is_a_setting_of_the_same_learner_and_server(tmp_path: Path) -> None:
    """K = M, one fragment, no overlap: everybody merges the same number of steps in every round,
    at the pace of the slowest, and what that costs is counted as waiting.
    """
    spec = tiny_spec(
        fragments=1,
        quorum=2,
        min_learners=2,
        budget_tokens=16 * 160,
        adoption={"max_overlap_steps": 0},
    )
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with OuterServer(tmp_path / "run") as server, ThreadPoolExecutor(2) as pool:
        fast = pool.submit(_learn, server, "fast", 0.002)
        slow = pool.submit(_learn, server, "slow", 0.02)
        outcomes = [fast.result(60), slow.result(60)]
        status = server.status()
    # A round is H = 4 steps: one that the budget cut short, and some that began while the other was
    # still compiling. On its own the fast one would make ten times the steps.
    assert abs(outcomes[0].steps - outcomes[1].steps) <= 32
    # On a busy machine both wait for merges, too.
    assert outcomes[0].wait_share > max(0.5, outcomes[1].wait_share)
    assert {outcome.weights_digest for outcome in outcomes} == {status.weights_digest}
    assert status.rounds_merged >= 16
