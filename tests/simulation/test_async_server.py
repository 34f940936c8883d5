"""The server that applies every push alone: what counts, and when it asks."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from fragments.payload import encode_int8
from fragments.quantize import quantize, valid_counts
from fragments.records import (
    PROTOCOL_VERSION,
    Ask,
    Contribution,
    ContributionKey,
    Hello,
    Lease,
    Receipt,
    Report,
    Role,
    ServerNote,
    Version,
    Welcome,
)
from outer_server.core.events import Attached, Join, Reported
from outer_server.core.state import new_state
from outer_server.parameters import Parameters
from simulation.async_server import AsyncServer, Paced
from simulation.clock import VirtualClock
from tests.support.tiny import tiny_birth, tiny_spec

SPEC = tiny_spec()
LAYOUT, VALUES = tiny_birth(SPEC)


def _server(paced: Paced) -> AsyncServer:
    parameters = Parameters.newborn(SPEC, LAYOUT, VALUES)
    state = new_state(SPEC, parameters.digests(), generation=1)
    return AsyncServer(VirtualClock(), state, parameters, paced, 16, lambda: None)


def _join(server: AsyncServer, name: str, sink: Callable[[ServerNote], None]) -> Lease:
    hello = Hello(PROTOCOL_VERSION, "tiny", LAYOUT.digest, name, Role.LEARNER, "1")
    welcome = server.call(Join(hello))
    assert isinstance(welcome, Welcome)
    server.call(Attached(name, welcome.lease.token), sink)
    return welcome.lease


def _push(name: str, fragment: int, base: int) -> Contribution:
    part, rows = LAYOUT.fragments[fragment], LAYOUT.rows_padded
    valid = valid_counts(part, rows)
    ones = np.where(np.arange(LAYOUT.block)[None, :] < valid[:, None], np.float32(1), np.float32(0))
    made = quantize(jnp.asarray(ones), jnp.asarray(valid), 1.0)
    payload = encode_int8(part, np.asarray(made.codes), np.asarray(made.step_bits))
    key = ContributionKey(name, fragment, Version(1, base))
    return Contribution(key, Version(1, base), 4, 64, 0, 4, payload)


def test_a_repeated_push_counts_once() -> None:
    server = _server("learner")
    lease = _join(server, "a", lambda note: None)
    first = server.contribute(lease, _push("a", 0, base=0))
    assert first == Receipt(ContributionKey("a", 0, Version(1, 0)))
    digest = server.parameters.digests()
    again = server.contribute(lease, _push("a", 0, base=0))
    assert isinstance(again, Receipt)
    assert again.duplicate
    assert server.parameters.digests() == digest
    state = server.state
    assert (state.fragments[0].version, state.rounds_merged, state.tokens_merged) == (1, 1, 64)
    # The next base is another push, and the server says so to who joins again.
    assert not _duplicate(server.contribute(lease, _push("a", 0, base=1)))
    hello = Hello(PROTOCOL_VERSION, "tiny", LAYOUT.digest, "a", Role.LEARNER, "1")
    welcome = server.call(Join(hello))
    assert isinstance(welcome, Welcome)
    assert welcome.consumed == (1, -1)


def _duplicate(reply: object) -> bool:
    assert isinstance(reply, Receipt)
    return reply.duplicate


def _asked_at(paced: Paced) -> dict[str, list[tuple[int, int]]]:
    """(step of the asked learner, fragment) of every ask, while b makes half as many steps as a."""
    server = _server(paced)
    asked: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    steps = {"a": 0, "b": 0}

    def sink(name: str) -> Callable[[ServerNote], None]:
        def hear(note: ServerNote) -> None:
            if isinstance(note, Ask):
                asked[name].append((steps[name], note.fragment))

        return hear

    leases = {name: _join(server, name, sink(name)) for name in "ab"}
    for step in range(1, 9):
        for name in "ab" if step % 2 == 0 else "a":
            steps[name] += 1
            report = Report(steps[name], 16 * steps[name], steps[name])
            server.call(Reported(name, leases[name].token, report))
    return asked


def test_fragments_are_due_by_each_learners_own_steps_or_by_the_fastests() -> None:
    """H = 4 and two fragments: slot k falls at step 2k and is that of fragment k mod 2."""
    assert _asked_at("learner") == {
        "a": [(2, 1), (4, 0), (6, 1), (8, 0)],
        "b": [(2, 1), (4, 0)],
    }
    # A report of a's moves the clock before b has made its step of that moment.
    assert _asked_at("server") == {
        "a": [(2, 1), (4, 0), (6, 1), (8, 0)],
        "b": [(0, 1), (1, 0), (2, 1), (3, 0)],
    }
