"""One run of many islands on the virtual clock: the scheduler, merge and codec of production."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fragments.digest import combine
from fragments.errors import SettingsError
from fragments.records import Phase, Role
from fragments.runspec import RunSpec
from fragments.tree import TreeCodec
from learner.member import layout_of
from learner.program import Params, Program
from outer_server.core.events import Event
from outer_server.core.scheduler import Outcome
from outer_server.core.state import RunState, new_state
from outer_server.core.step import FragmentParameters
from outer_server.parameters import Parameters
from simulation.async_server import AsyncServer, Paced
from simulation.clock import StalledError, VirtualClock
from simulation.fate import Fate
from simulation.late import AgainstCurrent
from simulation.learner import Setting, SimulatedLearner
from simulation.ports import Server
from simulation.result import LearnerResult, Point, RunResult
from simulation.server import SimulatedServer
from simulation.world import StepTimes, World, learner_name

EVALUATIONS = 12
"""Held-out losses in a run's curve, evenly over its tokens."""

PATIENCE = 40.0
"""A run that takes this many times what its learners need without any wait is stalled."""


def simulate(
    spec: RunSpec,
    world: World,
    program: Program,
    params: Params,
    *,
    applied_alone: Paced | None = None,
    late_against: Literal["base", "current"] = "base",
    policy: str = "decoupled",
    evaluations: int = EVALUATIONS,
    on_progress: Callable[[float], None] = lambda share: None,
    on_outcome: Callable[[Event, Outcome], None] = lambda event, outcome: None,
) -> RunResult:
    """Train `program` from `params` under `spec` in `world`; equal arguments give equal bits.

    Args:
        spec: all settings of the run; its seed also seeds the world's jitter. `max_learners` is
            set to the world's number of learners, which is also the number of data shards.
        params: version 0.
        applied_alone: no rounds: every contribution is applied alone, pushed as this says.
        late_against: what late contributions are taken against; "base" is the production rule.
        policy: what the result calls itself.
        on_progress: told the share of the budget trained, at every evaluation.
        on_outcome: told every event of the scheduler and what came of it (not with
            `applied_alone`).

    Raises:
        SettingsError: when the world cannot be run under these settings.
        StalledError: when the run cannot end, such as K learners of which one never returns.
    """
    run = _Run(
        spec,
        world,
        program,
        params,
        applied_alone,
        late_against,
        evaluations,
        on_progress,
        on_outcome,
    )
    return run.go(policy)


@dataclass(slots=True)
class _Curve:
    """Evaluates a run's broadcast copy as its tokens pass the marks."""

    program: Program
    codec: TreeCodec
    params: Params
    marks: int
    points: list[Point] = field(default_factory=list)

    def loss(self, fragments: list[FragmentParameters]) -> float:
        """Held-out loss of the broadcast copy."""
        params = self.params
        for index, fragment in enumerate(fragments):
            params = self.codec.replace(index, params, fragment.broadcast_BxN)
        return self.program.evaluate(params)

    def is_due(self, share: float) -> bool:
        """Has a mark been passed since the last point?"""
        return share * self.marks >= len(self.points) + 1


class _Run:
    def __init__(
        self,
        spec: RunSpec,
        world: World,
        program: Program,
        params: Params,
        applied_alone: Paced | None,
        late_against: Literal["base", "current"],
        evaluations: int,
        on_progress: Callable[[float], None],
        on_outcome: Callable[[Event, Outcome], None],
    ) -> None:
        spec = _completed(spec, world)
        layout = layout_of(program, params, spec)
        codec = TreeCodec(layout, params)
        values = [np.asarray(codec.pack(p, params)) for p in range(len(layout.fragments))]
        parameters = Parameters.newborn(spec, layout, values)
        state = new_state(spec, parameters.digests(), generation=1)
        self._spec, self._world, self._program = spec, world, program
        self._on_progress = on_progress
        self._curve = _Curve(program, codec, params, evaluations)
        self._clock = VirtualClock()
        self._server: Server
        if applied_alone is None:
            late = AgainstCurrent(spec, layout) if late_against == "current" else None
            self._server = SimulatedServer(
                self._clock, state, parameters, world.merge_s, self._server_moved, late, on_outcome
            )
        else:
            self._server = AsyncServer(
                self._clock,
                state,
                parameters,
                applied_alone,
                program.tokens_per_step,
                self._server_moved,
            )
        setting = Setting(
            self._clock, self._server, program, spec, layout, params, world.checkpoint_steps
        )
        self._learners = [
            SimulatedLearner(
                setting,
                learner_name(index),
                world.link_of(index),
                world.step_s,
                StepTimes(world, index, spec.seed),
            )
            for index in range(world.learners)
        ]
        self._budget_trained: tuple[float, float] | None = None
        self._fate: Fate | None = None
        self._fate = Fate(self._clock, world, self._learners, self._where)

    def go(self, policy: str) -> RunResult:
        """Run to the end."""
        total_speed = sum(1 / self._world.mean_step_s(i) for i in range(self._world.learners))
        steps = math.ceil(self._spec.budget_tokens / self._program.tokens_per_step)
        limit_s = PATIENCE * steps / total_speed + 60 * self._world.step_s
        try:
            self._clock.run(self._is_over, limit_s)
        except StalledError as error:
            state = self._server.state
            raise StalledError(
                f"{error}: {state.phase}, {state.phase_reason}, global step {state.global_step}, "
                f"{state.tokens_trained} of {self._spec.budget_tokens} tokens trained"
            ) from None
        return self._result(policy)

    def _is_over(self) -> bool:
        return self._server.state.phase is Phase.FINISHED and all(
            learner.finished for learner in self._learners
        )

    def _where(self) -> tuple[int, float]:
        state = self._server.state
        return state.global_step, state.tokens_trained / self._spec.budget_tokens

    def _server_moved(self) -> None:
        state = self._server.state
        share = state.tokens_trained / self._spec.budget_tokens
        if self._fate is not None:
            self._fate.look()
        if self._budget_trained is None and state.phase in (Phase.CLOSING, Phase.FINISHED):
            useful = sum(one.tally.steps - one.tally.steps_lost for one in self._learners)
            self._budget_trained = (self._clock.now_s, useful)
        if self._budget_trained is None and self._curve.is_due(share):
            loss = self._curve.loss(self._server.published)
            point = Point(tokens=state.tokens_trained, at_s=self._clock.now_s, loss=loss)
            self._curve.points.append(point)
            self._on_progress(share)

    def _possible_steps(self, until_s: float) -> int:
        """Learner-steps until then, had nobody waited, stalled or died."""
        if self._fate is None:
            raise AssertionError("a run that was not set up")
        total = 0
        for index, joined_at_s in self._fate.joined_at_s.items():
            times = StepTimes(self._world, index, self._spec.seed)
            at_s = joined_at_s + times.next_s()
            while at_s <= until_s:
                total += 1
                at_s += times.next_s()
        return total

    def _result(self, policy: str) -> RunResult:
        state, traffic = self._server.state, [one.traffic for one in self._learners]
        virtual_s, useful = self._budget_trained or (self._clock.now_s, 0.0)
        loss = self._curve.loss(self._server.published)
        last = Point(tokens=state.tokens_trained, at_s=self._clock.now_s, loss=loss)
        down = sum(one.bytes_down for one in traffic)
        return RunResult(
            policy=policy,
            loss=loss,
            loss_unit=self._program.loss_unit,
            tokens_trained=state.tokens_trained,
            tokens_pushed=state.tokens_pushed // len(state.fragments),
            tokens_merged=state.tokens_merged // len(state.fragments),
            merged_share=state.tokens_merged
            / (len(state.fragments) * max(1, state.tokens_trained)),
            rounds_merged=state.rounds_merged,
            rounds_abandoned=state.rounds_abandoned,
            virtual_s=virtual_s,
            finished_s=self._clock.now_s,
            goodput=useful / max(1, self._possible_steps(virtual_s)),
            bytes_up=sum(one.bytes_up for one in traffic),
            bytes_down=down + sum(one.bytes_down_full for one in traffic),
            bits_up=_bits(
                sum(one.bytes_up for one in traffic), sum(one.parameters_up for one in traffic)
            ),
            bits_down=_bits(down, sum(one.parameters_down for one in traffic)),
            digest=weights_digest(state),
            curve=(*self._curve.points, last),
            learners=tuple(_learner(state, one) for one in self._learners),
        )


def weights_digest(state: RunState) -> str:
    """Digest of the broadcast copy of all fragments."""
    return combine((state.epoch, p, f.version, f.digest) for p, f in enumerate(state.fragments))


def _completed(spec: RunSpec, world: World) -> RunSpec:
    count = world.learners
    if spec.min_learners > count:
        raise SettingsError(f"min_learners is {spec.min_learners}, the world has {count} learners")
    # Only the learner that never was there has no part; evaluators do not exist here.
    return spec.model_copy(update={"max_learners": count, "run_id": spec.run_id or "simulated"})


def _holds(learner: SimulatedLearner, digest: str) -> bool | None:
    island = learner.island
    if island is None:
        return None
    bases = enumerate(island.completed.bases)
    held = [(b.version.epoch, p, b.version.number, b.digest) for p, b in bases if b is not None]
    return combine(held) == digest


def _bits(payload_bytes: int, parameters: int) -> float | None:
    return 8 * payload_bytes / parameters if parameters else None


def _learner(state: RunState, learner: SimulatedLearner) -> LearnerResult:
    record = state.learners.get(learner.name)
    tally = record.tally if record is not None and record.role is Role.LEARNER else None
    return LearnerResult(
        name=learner.name,
        steps=learner.tally.steps,
        steps_lost=learner.tally.steps_lost,
        deaths=learner.tally.deaths,
        tokens_merged=tally.tokens_merged // len(state.fragments) if tally else 0,
        contributions_merged=tally.contributions_merged if tally else 0,
        contributions_late=tally.contributions_late if tally else 0,
        contributions_refused=tally.contributions_refused if tally else 0,
        holds_final=_holds(learner, weights_digest(state)),
    )
