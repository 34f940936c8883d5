"""A simulated line does with a contribution what a learner's own outbox would."""

from __future__ import annotations

import numpy as np

from fragments.records import Ask, Receipt, Refusal, RefusalCode
from fragments.tree import TreeCodec
from learner.member import layout_of
from outer_server.core.events import Contributed, Event, Leave, Send
from outer_server.core.scheduler import Outcome
from outer_server.core.state import new_state
from outer_server.parameters import Parameters
from simulation.clock import Order, VirtualClock
from simulation.learner import Setting, SimulatedLearner
from simulation.server import SimulatedServer
from simulation.world import StepTimes, World
from tests.support.tiny import TinyProgram, tiny_spec

LIMIT_S = 200.0


def test_a_contribution_that_a_lost_lease_refuses_is_sent_again_on_the_next() -> None:
    program = TinyProgram()
    spec = tiny_spec(fragments=1, lease_ttl_s=60.0, max_learners=1)
    world = World.model_validate({"speeds": [1.0], "link": {"upload_steps": 3, "latency_s": 0.1}})
    params = program.init_params(spec.seed)
    layout = layout_of(program, params, spec)
    values = [np.asarray(TreeCodec(layout, params).pack(0, params))]
    parameters = Parameters.newborn(spec, layout, values)
    clock = VirtualClock()
    told: list[tuple[Contributed, Outcome]] = []

    def note(event: Event, outcome: Outcome) -> None:
        if isinstance(event, Contributed):
            told.append((event, outcome))
        asked = any(isinstance(e, Send) and isinstance(e.note, Ask) for e in outcome.effects)
        if asked and not told:  # While the answer is under way, its sender's lease ends.
            clock.after(1.0, Order.TIMER, end_lease)

    def end_lease() -> None:
        server.call(Leave("a", server.state.learners["a"].token, "elsewhere"))

    state = new_state(spec, parameters.digests(), generation=1)
    server = SimulatedServer(clock, state, parameters, on_outcome=note)
    setting = Setting(clock, server, program, spec, layout, params, checkpoint_steps=100)
    learner = SimulatedLearner(
        setting, "a", world.link_of(0), world.step_s, StepTimes(world, 0, spec.seed)
    )
    learner.start()
    clock.run(lambda: len(told) == 1, LIMIT_S)
    refused_at_s = clock.now_s
    clock.run(lambda: clock.now_s > refused_at_s + 1, LIMIT_S)  # The refusal is heard.
    learner.cut()
    learner.heal()
    clock.run(lambda: len(told) == 2, LIMIT_S)
    (first, refused), (second, taken) = told
    assert isinstance(refused.reply, Refusal)
    assert refused.reply.code is RefusalCode.LEASE_LOST
    assert isinstance(taken.reply, Receipt)
    assert (first.meta, first.payload_digest) == (second.meta, second.payload_digest)
    assert second.token > first.token
