"""What a run is compared with: data-parallel, and one learner alone on its share of the tokens.

Both begin from the same parameters, take the same windows in the same order, and are judged by the
same evaluator as a simulated run. No failure is modelled: they are what the others are held to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fragments.errors import SettingsError
from learner.program import Batch, Params, Program, Shard
from simulation.pipe import BITS_PER_MBIT
from simulation.result import LearnerResult, Point, RunResult
from simulation.world import StepTimes, World, learner_name

_STEPS_IN_FLIGHT = 8
_BYTES_PER_PARAMETER = 4


def data_parallel(
    program: Program,
    params: Params,
    world: World,
    tokens: int,
    seed: int,
    *,
    evaluations: int = 12,
    on_progress: Callable[[float], None] = lambda share: None,
) -> RunResult:
    """All learners' gradients averaged at every step, until `tokens` are trained by all of them.

    That is one step on the learners' batches put together, which holds for any program whose loss
    is a mean over the leading axis of its batch's arrays. A step takes as long as the slowest
    learner's; where the world's lines have a bandwidth, a ring all-reduce of float32 gradients
    over the slowest of them is added: 2 (M - 1) / M times their bits, each way.

    Args:
        program, params, world, seed: as for `simulation.run.simulate`.
        tokens: of all learners, rounded up to whole steps.

    Raises:
        SettingsError: when something befalls the world's learners.
    """
    _check(world)
    count = world.learners
    times = [StepTimes(world, index, seed) for index in range(count)]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    bytes_each = 2 * (count - 1) * size * _BYTES_PER_PARAMETER // count
    reduce_s = _reduce_s(world, bytes_each)
    plain = _all_together(program, count, tokens, 0)
    plain.step_s = lambda: max(one.next_s() for one in times) + reduce_s
    plain.evaluations, plain.on_progress = evaluations, on_progress
    plain.train(params)
    possible = sum(plain.at_s / world.mean_step_s(index) for index in range(count))
    learners = tuple(_result(learner_name(index), plain.steps) for index in range(count))
    wire_bytes = plain.steps * count * bytes_each
    bits = 8 * _BYTES_PER_PARAMETER * 2 * (count - 1) / count
    return plain.result("data_parallel", learners, possible, wire_bytes, bits)


def checkpoint(
    program: Program, params: Params, learners: int, tokens: int, first_cursor: int
) -> Params:
    """What data-parallel training over `tokens` leaves; every shard begins at `first_cursor`."""
    plain = _all_together(program, learners, tokens, first_cursor)
    plain.train(params)
    return plain.params


def alone(
    program: Program,
    params: Params,
    world: World,
    tokens: int,
    seed: int,
    *,
    evaluations: int = 12,
    on_progress: Callable[[float], None] = lambda share: None,
) -> RunResult:
    """Learner 0 by itself on its shard, until it has trained `tokens`; arguments as above."""
    _check(world)
    shard, times = Shard(0, world.learners), StepTimes(world, 0, seed)
    plain = _Plain(
        program,
        batch=lambda cursor: program.batch(shard, cursor),
        steps=math.ceil(tokens / program.tokens_per_step),
        tokens_per_step=program.tokens_per_step,
        first_cursor=0,
        step_s=times.next_s,
        evaluations=evaluations,
        on_progress=on_progress,
    )
    plain.train(params)
    learners = (_result(learner_name(0), plain.steps),)
    return plain.result("alone", learners, plain.steps, 0, None)


@dataclass(slots=True)
class _Plain:
    """Plain training of one copy of the model; progress runs from 0 to 1 over its steps."""

    program: Program
    batch: Callable[[int], Batch]
    steps: int
    tokens_per_step: int
    first_cursor: int
    step_s: Callable[[], float] = lambda: 0.0
    evaluations: int = 1
    on_progress: Callable[[float], None] = lambda share: None
    at_s: float = 0.0
    params: Params = None
    points: list[Point] = field(default_factory=list)

    def train(self, params: Params) -> None:
        """Train from `params`; the curve's last point is that of the end."""
        if self.steps < 1:
            raise SettingsError("no tokens to train on")
        program, inner = self.program, self.program.init_inner(params)
        for number in range(self.steps):
            batch = self.batch(self.first_cursor + number)
            params, inner, loss = program.step(
                params, inner, batch, jnp.float32(number / self.steps)
            )
            if number % _STEPS_IN_FLIGHT == 0:
                loss.block_until_ready()  # bounds what is dispatched ahead, and so its memory
            self.at_s += self.step_s()
            done = number + 1
            if done == self.steps or done * self.evaluations >= (len(self.points) + 1) * self.steps:
                held_out = program.evaluate(params)
                point = Point(tokens=done * self.tokens_per_step, at_s=self.at_s, loss=held_out)
                self.points.append(point)
                self.on_progress(done / self.steps)
        self.params = params

    def result(
        self,
        policy: str,
        learners: tuple[LearnerResult, ...],
        possible_steps: float,
        wire_bytes: int,
        bits: float | None,
    ) -> RunResult:
        """The run as others give theirs; one merge a step where there is anything to merge."""
        tokens = self.steps * self.tokens_per_step
        return RunResult(
            policy=policy,
            loss=self.points[-1].loss,
            loss_unit=self.program.loss_unit,
            tokens_trained=tokens,
            tokens_pushed=tokens if bits else 0,
            tokens_merged=tokens if bits else 0,
            merged_share=1.0,
            rounds_merged=self.steps if bits else 0,
            rounds_abandoned=0,
            virtual_s=self.at_s,
            finished_s=self.at_s,
            goodput=len(learners) * self.steps / possible_steps,
            bytes_up=wire_bytes,
            bytes_down=wire_bytes,
            bits_up=bits,
            bits_down=bits,
            digest=tree_digest(self.params),
            curve=tuple(self.points),
            learners=learners,
        )


def tree_digest(params: Params) -> str:
    """Sha256 over the bits of all leaves, by path (64 hex digits)."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode() + b"\0")
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _all_together(program: Program, count: int, tokens: int, first_cursor: int) -> _Plain:
    shards = [Shard(index, count) for index in range(count)]
    tokens_per_step = count * program.tokens_per_step
    return _Plain(
        program,
        batch=lambda cursor: _together([program.batch(shard, cursor) for shard in shards]),
        steps=math.ceil(tokens / tokens_per_step),
        tokens_per_step=tokens_per_step,
        first_cursor=first_cursor,
    )


def _check(world: World) -> None:
    if world.befalls:
        raise SettingsError("a baseline knows no failures: leave `befalls` out of its world")


def _together(batches: Sequence[Batch]) -> Batch:
    def join(*parts: Any) -> Any:
        return np.concatenate(parts)

    return jax.tree.map(join, *batches)


def _reduce_s(world: World, wire_bytes: int) -> float:
    slowest_s = 0.0
    for index in range(world.learners):
        link = world.link_of(index)
        for mbit_s in (link.up_mbit_s, link.down_mbit_s):
            if mbit_s is not None:
                slowest_s = max(slowest_s, wire_bytes * 8 / (mbit_s * BITS_PER_MBIT))
    return slowest_s


def _result(name: str, steps: int) -> LearnerResult:
    return LearnerResult(
        name=name,
        steps=steps,
        steps_lost=0.0,
        deaths=0,
        tokens_merged=0,
        contributions_merged=0,
        contributions_late=0,
        contributions_refused=0,
    )
