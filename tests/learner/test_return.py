"""A learner that begins where an earlier process stood, or where another one has been meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fragments.digest import digest_hex
from fragments.errors import CheckpointError
from fragments.payload import encode_f32
from fragments.records import (
    Ask,
    Contribution,
    ContributionKey,
    Decline,
    DeclineReason,
    Hello,
    Lease,
    Receipt,
    Report,
    Update,
    Version,
    Welcome,
)
from learner.held import Completed
from learner.island import Island
from learner.member import layout_of
from learner.program import Shard
from learner.run import CheckpointRule, Learner
from learner.trainer import Trainer
from learner.warmup import InnerWarmup
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from tests.support.direct import DirectLink
from tests.support.tiny import TinyProgram, tiny_birth, tiny_spec

WAIT_S = 60.0


def _updates(version: int = 0) -> list[Update]:
    """Full values of both fragments."""
    layout, values = tiny_birth(tiny_spec())
    return [
        Update(
            p,
            Version(1, version),
            None,
            digest_hex(jnp.asarray(value)),
            encode_f32(layout.fragments[p], value),
        )
        for p, value in enumerate(values)
    ]


def _island(mode: str = "overwrite") -> Island:
    spec, program = tiny_spec(adoption={"mode": mode}), TinyProgram()
    params = program.init_params(0)
    layout = layout_of(program, params, spec)
    return Island("a", layout, spec.codec, params, cursor=0, adoption=spec.adoption)


def _trained(mode: str = "overwrite") -> Completed:
    """After five steps on base 0 of both fragments."""
    island = _island(mode)
    for update in _updates():
        island.prepare(update)
    at = island.adopt(island.completed).completed
    moved = jax.tree.map(lambda leaf: leaf - jnp.float32(0.25), at.params)
    return Completed(5, 80, 5, moved, at.bases, Shard(0, 2))


@pytest.mark.parametrize("mode", ["overwrite", "alpha", "rebase"])
def test_progress_on_the_newest_version_is_kept_and_on_any_other_given_up(mode: str) -> None:
    island = _island(mode)
    kept = _trained(mode)
    island.resume(kept)
    # Fragment 1 has moved on while the process was dead; the server has heard of eight batches.
    island.begin([Version(1, 0), Version(1, 3)], Shard(0, 2), 8)
    island.prepare(replace(_updates()[1], version=Version(1, 3)))
    island.completed = island.adopt(island.completed).completed
    answer = island.answer(Ask(0, Version(1, 0)))
    assert isinstance(answer, Contribution)
    assert (answer.steps, answer.tokens, answer.cursor_from, answer.cursor_to) == (5, 80, 0, 8)
    assert island.answer(Ask(1, Version(1, 3))) == Decline(1, Version(1, 3), DeclineReason.NO_STEPS)
    # Not mixed with what is of yesterday.
    names = [slot.spec.path for slot in island.layout.fragments[1].slots]
    assert names == ["['b']"]
    np.testing.assert_array_equal(island.completed.params["b"], TinyProgram().init_params(0)["b"])


def test_what_another_epoch_had_is_no_base() -> None:
    island = _island()
    island.resume(_trained())
    island.begin([Version(2, 0), Version(2, 0)], Shard(0, 2), 5)
    answer = island.answer(Ask(0, Version(2, 0)))
    assert answer == Decline(0, Version(2, 0), DeclineReason.NO_BASE)
    assert island.adopted() == ()


def test_what_was_trained_on_anothers_data_is_given_up() -> None:
    island = _island()
    island.resume(_trained())
    island.begin([Version(1, 0), Version(1, 0)], Shard(1, 2), 40)
    assert island.answer(Ask(0, Version(1, 0))) == Decline(0, Version(1, 0), DeclineReason.NO_STEPS)
    assert island.completed.cursor == 40
    np.testing.assert_array_equal(island.completed.params["w"], TinyProgram().init_params(0)["w"])


def test_a_running_learner_moves_at_its_next_step() -> None:
    """Its place was taken while it was away: other data, and nothing of the old is sent."""
    island = _island()
    for update in _updates():
        island.prepare(update)
    island.begin([Version(1, 0)] * 2, Shard(0, 2), 0)
    seen: list[tuple[int, int]] = []
    stop = threading.Event()

    class Watched(TinyProgram):
        def batch(self, shard: Shard, cursor: int) -> Any:
            seen.append((shard.index, cursor))
            return super().batch(shard, cursor)

    def on_report(report: Report) -> None:
        if report.step == 4:
            island.move(Shard(1, 2), 30)
        if report.step >= 12:
            stop.set()

    Trainer(Watched(), island, lambda _: 0.0, on_report, lambda _: None).run(stop)
    moved_at = next(i for i, (shard, _) in enumerate(seen) if shard == 1)
    assert seen[:moved_at] == [(0, cursor) for cursor in range(moved_at)]
    assert seen[moved_at:] == [(1, 30 + i) for i in range(len(seen) - moved_at)]
    answer = island.answer(Ask(0, Version(1, 0)))
    assert isinstance(answer, Contribution)
    assert answer.cursor_from == 30
    assert answer.steps == answer.cursor_to - 30


@pytest.mark.parametrize(
    ("shard", "told", "begins"),
    [(Shard(0, 4), 101, 103), (Shard(0, 4), 110, 110), (Shard(1, 4), 7, 7)],
)
def test_a_move_within_a_shard_goes_forward_only(shard: Shard, told: int, begins: int) -> None:
    """The server says what it had heard of when it was asked, and training has gone on since."""
    island = _island()
    island.completed = replace(island.completed, cursor=100, shard=Shard(0, 4))
    island.move(shard, told)
    now = replace(island.completed, step=3, tokens=48, cursor=103)
    moved = island.moved(now)
    assert moved is not None
    assert (moved.shard, moved.cursor) == (shard, begins)
    assert island.moved(moved) is None


@pytest.mark.parametrize("move", [None, Shard(0, 2), Shard(1, 2)])
def test_what_is_begun_anew_after_an_answer_is_not_taken_back_by_the_next_version(
    move: Shard | None,
) -> None:
    """Rebasing keeps progress since the answer, and of that there is none."""
    island = _island("rebase")
    island.resume(_trained("rebase"))
    island.begin([Version(1, 0)] * 2, Shard(0, 2), 5)
    assert isinstance(island.answer(Ask(0, Version(1, 0))), Contribution)
    at = island.completed
    if move is None:
        anew: Completed | None = island.from_bases(replace(at, cursor=6))
    else:
        island.move(move, 9)
        anew = island.moved(at)
    assert anew is not None
    island.completed = anew
    island.prepare(replace(_updates()[0], version=Version(1, 1)))
    now = island.adopt(island.completed).completed
    np.testing.assert_array_equal(now.params["w"], TinyProgram().init_params(0)["w"])
    base = now.bases[0]
    assert base is not None
    assert (base.step, base.tokens, base.cursor) == (anew.step, anew.tokens, anew.cursor)


def test_an_answer_that_was_thrown_away_consumed_nothing() -> None:
    island = _island()
    island.resume(_trained())
    island.begin([Version(1, 0)] * 2, Shard(0, 2), 5)
    answer = island.answer(Ask(0, Version(1, 0)))
    assert isinstance(answer, Contribution)
    island.unanswered(ContributionKey("a", 0, Version(1, 3)))
    assert isinstance(island.answer(Ask(0, Version(1, 0))), Decline)
    island.unanswered(answer.key)
    assert isinstance(island.answer(Ask(0, Version(1, 0))), Contribution)


def test_the_first_steps_are_shortened_and_grow() -> None:
    warmup = InnerWarmup(3)
    before, after = {"w": jnp.zeros(2, jnp.bfloat16)}, {"w": jnp.full(2, 8.0, jnp.bfloat16)}
    assert warmup.apply(before, after) is after
    warmup.begin()
    made = [float(warmup.apply(before, after)["w"][0]) for _ in range(4)]
    assert made == [2.0, 4.0, 6.0, 8.0]
    assert warmup.apply(before, after)["w"].dtype == jnp.bfloat16


class Recorded(DirectLink):
    """Remembers what was said and what was sent."""

    def __init__(self, server: OuterServer) -> None:
        super().__init__(server)
        self.hellos: list[Hello] = []
        self.welcomes: list[Welcome] = []
        self.sent: list[Contribution] = []

    def join(self, hello: Hello) -> Welcome:
        self.hellos.append(hello)
        self.welcomes.append(super().join(hello))
        return self.welcomes[-1]

    def push(self, lease: Lease, contribution: Contribution) -> Receipt:
        receipt = super().push(lease, contribution)
        self.sent.append(contribution)
        return receipt


def _run(server: OuterServer, kept: Path, until: Callable[[Recorded], bool]) -> Recorded:
    """One process of the learner, stopped once it is so."""
    link, stop = Recorded(server), threading.Event()
    rule = CheckpointRule(kept, every_s=1e6)
    learner = Learner("a", TinyProgram(), link, link.describe(), pace_s=0.004, checkpoints=rule)
    thread = threading.Thread(target=learner.run, args=(stop,))
    thread.start()
    for _ in range(int(WAIT_S / 0.01)):
        if until(link) or not thread.is_alive():
            break
        stop.wait(0.01)
    stop.set()
    thread.join(WAIT_S)
    assert until(link)
    return link


def test_a_stopped_learner_goes_on_where_it_was(tmp_path: Path) -> None:
    spec = tiny_spec(budget_tokens=16 * 10**6, sync_interval=48)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with OuterServer(tmp_path / "run") as server:
        first = _run(server, tmp_path / "kept", lambda link: len(link.sent) >= 4)
        between = server.status()
        second = _run(server, tmp_path / "kept", lambda link: len(link.sent) >= 4)
        after = server.status()
    assert first.hellos[0].cursor == 0
    hello, welcome = second.hellos[0], second.welcomes[0]
    # It was stopped in order: its checkpoint is of its very last step.
    assert hello.cursor == welcome.cursor == between.learners[0].cursor
    assert not hello.bases, "told once it is known which are bases still"
    assert after.tokens_trained == after.learners[0].tokens > between.tokens_trained
    for fragment in range(2):
        mine = [c for c in (*first.sent, *second.sent) if c.key.fragment == fragment]
        spans = sorted((c.cursor_from, c.cursor_to) for c in mine)
        assert all(one[1] <= two[0] for one, two in pairwise(spans))
        assert all(c.steps == c.cursor_to - c.cursor_from for c in mine)
    # What it had trained and not sent is in its first answers.
    assert min(c.cursor_from for c in second.sent) < hello.cursor


def test_anothers_checkpoints_end_a_learner_before_it_joins(tmp_path: Path) -> None:
    spec = tiny_spec(budget_tokens=16 * 10**6)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with OuterServer(tmp_path / "run") as server:
        _run(server, tmp_path / "kept", lambda link: len(link.sent) >= 1)
        link = DirectLink(server)
        rule = CheckpointRule(tmp_path / "kept", every_s=60.0)
        other = Learner("b", TinyProgram(), link, link.describe(), checkpoints=rule)
        with pytest.raises(CheckpointError, match="learner 'a', and this is learner 'b'"):
            other.run(threading.Event())
        assert [one.name for one in server.status().learners] == ["a"]
