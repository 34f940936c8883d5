"""Session and outbox on a line that breaks at the worst moments, and a loss that is not finite."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fragments.digest import digest_hex
from fragments.errors import NonFiniteError, RefusedError, UnreachableError
from fragments.payload import encode_f32
from fragments.records import (
    Adopted,
    Ask,
    Contribution,
    Decline,
    DeclineReason,
    Evaluation,
    Goodbye,
    Hello,
    Lease,
    Phase,
    Progress,
    Receipt,
    RefusalCode,
    Report,
    Role,
    RunDescription,
    ServerNote,
    Update,
    Version,
    Welcome,
)
from fragments.runspec import AdoptionSettings
from learner.held import Completed
from learner.island import Island
from learner.member import layout_of
from learner.outbox import Outbox
from learner.program import Shard
from learner.run import Learner
from learner.session import Session
from learner.trainer import MAX_RESTARTS, Trainer
from outer_server.history import data_account
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from tests.support.direct import DirectLink
from tests.support.tiny import TinyProgram, tiny_birth, tiny_spec

WAIT_S = 20.0


class DeadLine:
    """Says nothing, hears nothing, and ends at once, unless `link.lasts`: what gRPC gives where
    nobody answers.
    """

    def __init__(
        self,
        link: ScriptedLink,
        on_note: Callable[[ServerNote], None],
        on_closed: Callable[[], None],
    ) -> None:
        self.link = link
        if link.lasts:
            threading.Thread(target=on_note, args=[Progress(0, 0, Phase.TRAINING)]).start()
        else:
            threading.Thread(target=on_closed, daemon=True).start()

    def report(self, report: Report) -> None:
        self.link.said.append(report)

    def decline(self, decline: Decline) -> None:
        self.link.said.append(decline)

    def adopted(self, adopted: Adopted) -> None:
        self.link.said.append(adopted)

    def evaluated(self, evaluation: Evaluation) -> None:
        self.link.said.append(evaluation)

    def close(self) -> None:
        pass


class ScriptedLink:
    """Grants every join; streams are dead, unless it `lasts`; pushes do as they are told."""

    def __init__(self, *, lasts: bool = False) -> None:
        self.lasts = lasts
        self.opened: list[float] = []
        self.said: list[Any] = []
        self.pushed: list[Contribution] = []
        self.push_errors: list[Exception] = []
        self.joins = 0
        self.arrived_bytes = 0

    def describe(self) -> RunDescription:
        raise UnreachableError("not needed here")

    def join(self, hello: Hello) -> Welcome:
        self.joins += 1
        lease = Lease(hello.name, self.joins, 15.0)
        return Welcome(lease, 1, 1, Phase.TRAINING, (0, 0), (-1, -1), 0, 1, 0, 0, 0, 5.0)

    def open_control(
        self, lease: Lease, on_note: Callable[[ServerNote], None], on_closed: Callable[[], None]
    ) -> DeadLine:
        self.opened.append(time.monotonic())
        return DeadLine(self, on_note, on_closed)

    def push(self, lease: Lease, contribution: Contribution) -> Receipt:
        self.pushed.append(contribution)
        if self.push_errors:
            raise self.push_errors.pop(0)
        return Receipt(contribution.key)

    def pull(self, lease: Lease, fragment: int, have: Version | None) -> tuple[Update, ...]:
        return ()

    def leave(self, lease: Lease, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def _hello() -> Hello:
    return Hello(1, "tiny", "layout", "a", Role.LEARNER, "1")


def _session(link: ScriptedLink) -> Session:
    return Session(link, _hello, lambda _: None, lambda: None, lambda _: None)


def _until(condition: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        done.wait(0.01)
    pytest.fail("waited too long")


def test_streams_that_end_at_once_are_reopened_with_growing_pauses() -> None:
    link = ScriptedLink()
    session = _session(link)
    session.start(threading.Event(), WAIT_S)
    _until(lambda: len(link.opened) >= 4)
    session.stop("done")
    pauses = np.diff(link.opened)
    # Doubled from 0.4 s on, each jittered down to half at most.
    assert pauses[0] >= 0.2
    assert pauses[1] >= 0.4
    assert pauses[2] >= 0.8


def test_what_was_said_while_no_stream_was_open_is_said_on_the_next() -> None:
    link = ScriptedLink()
    session = _session(link)
    session.start(threading.Event(), WAIT_S)
    _until(lambda: len(link.opened) >= 1)
    adopted = Adopted(1, Version(1, 3), "d", 7)
    session.adopted(adopted)
    session.report(Report(8, 128, 8))
    link.said.clear()
    count = len(link.opened)
    _until(lambda: len(link.opened) > count and Report(8, 128, 8) in link.said)
    session.stop("done")
    assert adopted in link.said
    assert link.said.index(adopted) < link.said.index(Report(8, 128, 8))


def _island(adoption: AdoptionSettings | None = None) -> Island:
    """An island that holds base 0 of both fragments and has made a step."""
    spec, program = tiny_spec(), TinyProgram()
    params = program.init_params(0)
    layout = layout_of(program, params, spec)
    island = Island("a", layout, spec.codec, params, cursor=0, adoption=adoption)
    _, values = tiny_birth(spec)
    for p, value in enumerate(values):
        digest = digest_hex(jnp.asarray(value))
        payload = encode_f32(layout.fragments[p], value)
        island.prepare(Update(p, Version(1, 0), None, digest, payload))
    at = island.adopt(island.completed).completed
    moved = jax.tree.map(lambda leaf: leaf - jnp.float32(0.25), at.params)
    island.completed = Completed(1, 16, 1, moved, at.bases)
    return island


@pytest.mark.parametrize(
    "error",
    [
        UnreachableError("the answer was lost"),
        RefusedError(RefusalCode.LEASE_LOST, "the lease lapsed"),
    ],
)
def test_a_push_that_did_not_come_through_is_repeated_with_the_same_bytes(
    error: Exception,
) -> None:
    link = ScriptedLink(lasts=True)
    session = _session(link)
    session.start(threading.Event(), WAIT_S)
    outbox = Outbox(_island(), link, session)
    outbox.start()
    link.push_errors.append(error)
    # The second ask comes while the first push is failing: it must not be slept over.
    outbox.ask(Ask(0, Version(1, 0)))
    outbox.ask(Ask(1, Version(1, 0)))
    _until(lambda: len(link.pushed) >= 3)
    outbox.stop()
    session.stop("done")
    by_fragment = {p: [c for c in link.pushed if c.key.fragment == p] for p in (0, 1)}
    repeated = max(by_fragment.values(), key=len)
    assert len(repeated) == 2
    assert repeated[0] == repeated[1]
    assert all(by_fragment.values())


def test_what_the_server_says_never_arrived_is_made_again_of_all_steps_since() -> None:
    link = ScriptedLink()
    session = _session(link)
    session.start(threading.Event(), WAIT_S)
    island = _island()
    outbox = Outbox(island, link, session)
    outbox.start()
    link.push_errors.append(UnreachableError("the server has died"))
    outbox.ask(Ask(0, Version(1, 0)))
    _until(lambda: len(link.pushed) == 1)
    # As a join would: nothing has arrived, and training has gone on.
    island.consumed((-1, -1), epoch=1)
    before = island.completed
    island.completed = replace(before, step=9, tokens=144, cursor=9)
    link.lasts = True
    _until(lambda: len(link.pushed) == 2)
    outbox.stop()
    session.stop("done")
    first, again = link.pushed
    assert first.key == again.key
    assert (first.steps, again.steps) == (1, 9)
    assert (first.cursor_to, again.cursor_to) == (1, 9)
    # By then its base is consumed, whatever becomes of the answer.
    ask = Ask(0, Version(1, 0))
    assert island.answer(ask) == Decline(0, Version(1, 0), DeclineReason.CONSUMED, Version(1, 0))


def _trained_on(island: Island, step: int) -> None:
    now = island.completed
    moved = jax.tree.map(lambda leaf: leaf - jnp.float32(0.5), now.params)
    island.completed = replace(now, step=step, tokens=16 * step, cursor=step, params=moved)


def test_what_is_kept_by_adopting_is_in_no_answer_that_is_made_again() -> None:
    """With "rebase" all progress since the first answer goes out with the next base's."""
    ask = Ask(0, Version(1, 0))
    for mode, cursor_to in (("rebase", 1), ("overwrite", 9), ("alpha", 9)):
        island = _island(AdoptionSettings.model_validate({"mode": mode}))
        first = island.answer(ask)
        assert isinstance(first, Contribution)
        _trained_on(island, 9)
        island.consumed((-1, -1), epoch=1)
        assert island.may_grow(first) is (mode != "rebase")
        again = island.answer(ask)
        assert isinstance(again, Contribution)
        assert again.cursor_to == cursor_to, mode
        assert (again.payload == first.payload) is (mode == "rebase")


def test_a_base_that_was_begun_anew_lets_nothing_grow() -> None:
    island = _island()
    first = island.answer(Ask(0, Version(1, 0)))
    assert isinstance(first, Contribution)
    island.consumed((-1, -1), epoch=1)
    _trained_on(island, 5)
    assert island.may_grow(first)
    island.completed = island.from_bases(island.completed)
    _trained_on(island, 6)
    assert not island.may_grow(first)


def test_what_was_refused_is_declined_as_no_proof_of_a_loss() -> None:
    island, ask = _island(), Ask(0, Version(1, 0))
    answer = island.answer(ask)
    assert isinstance(answer, Contribution)
    island.refused(answer.key)
    assert island.answer(ask) == Decline(0, Version(1, 0), DeclineReason.CONSUMED)


def test_the_servers_word_on_consumed_bases_replaces_ones_own() -> None:
    island = _island()
    ask = Ask(0, Version(1, 0))
    assert isinstance(island.answer(ask), Contribution)
    assert island.answer(ask) == Decline(0, Version(1, 0), DeclineReason.CONSUMED, Version(1, 0))
    island.consumed((-1, -1), epoch=1)
    assert isinstance(island.answer(ask), Contribution)
    island.consumed((0, -1), epoch=1)
    assert island.answer(ask) == Decline(0, Version(1, 0), DeclineReason.CONSUMED, Version(1, 0))


class BadBatches(TinyProgram):
    """Some batches of the data are NaN."""

    def __init__(self, bad: Callable[[int], bool]) -> None:
        super().__init__()
        self._bad = bad

    def batch(self, shard: Shard, cursor: int) -> Any:
        x, y = super().batch(shard, cursor)
        return (np.full_like(x, np.nan), y) if self._bad(cursor) else (x, y)


def _train(program: TinyProgram, steps: int, pace_s: float = 0.0) -> tuple[Island, list[Report]]:
    island, reports = _island(), []
    stop = threading.Event()

    def on_report(report: Report) -> None:
        reports.append(report)
        if report.step >= steps:
            stop.set()

    trainer = Trainer(program, island, lambda _: 0.0, on_report, lambda _: None, pace_s)
    trainer.run(stop)
    return island, reports


def test_a_paced_step_is_told_to_take_its_pace_from_the_first_on() -> None:
    program = TinyProgram()
    _train(program, steps=1)  # It compiles.
    _, reports = _train(program, steps=4, pace_s=0.2)
    assert reports
    assert all(report.step_s >= 0.2 for report in reports)


def test_one_bad_batch_is_passed_over_and_training_goes_on() -> None:
    island, reports = _train(BadBatches(lambda cursor: cursor == 5), steps=20)
    assert all(np.isfinite(report.loss) for report in reports)
    assert reports[-1].cursor - reports[-1].step == 1, "one batch was passed over"
    answer = island.answer(Ask(0, Version(1, 0)))
    assert isinstance(answer, Contribution), "not declined as not finite"
    assert answer.cursor_from == 6


def test_a_loss_that_is_never_finite_ends_the_learner_with_a_sentence() -> None:
    with pytest.raises(NonFiniteError, match=f"{MAX_RESTARTS + 1} times in a row"):
        _train(BadBatches(lambda cursor: cursor >= 5), steps=20)


def _update(version: int) -> Update:
    """A full value of fragment 0 that is version 0 and `version` thousandths."""
    layout, values = tiny_birth(tiny_spec())
    value = values[0] + np.float32(version / 1000) * (values[0] != 0)
    digest = digest_hex(jnp.asarray(value))
    return Update(0, Version(1, version), None, digest, encode_f32(layout.fragments[0], value))


@pytest.mark.parametrize("pace_s", [0.0, 0.001])
@pytest.mark.parametrize("bad", [4, 5])
def test_a_loss_that_is_not_finite_right_after_an_adoption_leaves_what_was_adopted(
    bad: int, pace_s: float
) -> None:
    """The last completed step has the base before: the server would wait for it for ever."""
    island, stop = _island(), threading.Event()
    program = BadBatches(lambda cursor: cursor == bad)
    told: list[Adopted] = []

    def on_report(report: Report) -> None:
        if report.step == 4:
            island.prepare(_update(1))
        if report.step >= 12:
            stop.set()

    Trainer(program, island, lambda _: 0.0, on_report, told.append, pace_s).run(stop)
    now = island.completed
    base = now.bases[0]
    assert base is not None
    assert base.version == Version(1, 1)
    assert (base.cursor, base.step) == (bad + 1, bad), "begun anew after the bad batch"
    for fragment, version in enumerate((1, 0)):
        answer = island.answer(Ask(fragment, Version(1, version)))
        assert isinstance(answer, Contribution)
        assert answer.key.base_version == Version(1, version)
        assert answer.cursor_from == bad + 1
        assert answer.steps == answer.cursor_to - answer.cursor_from == now.step - bad
    newest = {each.fragment: each for each in told}
    assert tuple(newest[fragment] for fragment in range(2)) == island.adopted()


def test_what_was_adopted_stays_where_the_last_step_before_the_stop_is_not_finite() -> None:
    island, stop = _island(), threading.Event()
    losses: list[float] = []

    def on_report(report: Report) -> None:
        losses.append(report.loss)
        if report.step == 3:
            island.prepare(_update(1))
        if report.step in (4, 10):
            stop.set()

    # Its step is under way when the stop is seen, on the version that was adopted just before.
    program = BadBatches(lambda cursor: cursor == 4)
    trainer = Trainer(program, island, lambda _: 0.0, on_report, lambda _: None)
    trainer.run(stop)
    now = island.completed
    assert (now.step, now.tokens, now.cursor) == (4, 64, 5)
    assert [base.version.number for base in now.bases if base is not None] == [1, 0]
    kept = trainer.checkpoint()
    assert kept is not None
    assert kept.completed is now
    assert np.all(np.isfinite(now.params["w"]))
    assert np.isfinite(kept.inner)
    stop.clear()
    trainer.run(stop)
    assert np.all(np.isfinite(losses))
    answer = island.answer(Ask(0, Version(1, 1)))
    assert isinstance(answer, Contribution)
    assert (answer.cursor_from, answer.cursor_to) == (5, island.completed.cursor)


def test_who_is_to_pause_starts_over_first_where_the_last_step_is_not_finite() -> None:
    island, stop = _island(), threading.Event()
    reports: list[Report] = []

    def on_report(report: Report) -> None:
        reports.append(report)
        if report.paused:
            stop.set()

    program = BadBatches(lambda cursor: cursor == 3)
    bound = Trainer(
        program, island, lambda _: 0.0, on_report, lambda _: None, most_steps_on_base=lambda: 4
    )
    bound.run(stop)
    # Step 4 was made again on the batch after the bad one, and three more before the pause.
    assert [(r.step, r.cursor) for r in reports[:4]] == [(2, 2), (3, 3), (4, 5), (5, 6)]
    assert [(r.step, r.cursor) for r in reports if r.paused] == [(7, 8)]


def test_a_lone_learner_with_bad_batches_keeps_every_fragment_in_step(tmp_path: Path) -> None:
    spec = tiny_spec(budget_tokens=1 << 40)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    stop = threading.Event()
    program = BadBatches(lambda cursor: cursor % 11 in (0, 3, 4))
    with OuterServer(tmp_path / "run") as server:
        link = DirectLink(server)
        learner = Learner("a", program, link, link.describe(), pace_s=0.004)
        thread = threading.Thread(target=learner.run, args=(stop,))
        thread.start()
        try:
            _until(lambda: min(f.version for f in server.state.fragments) >= 24)
        finally:
            stop.set()
            thread.join(WAIT_S)
    found = data_account(tmp_path / "run")
    assert found.merged
    assert (found.overlaps, found.miscounts) == ((), ())
    # What was passed over is in a gap, never in what was merged.
    skipped = [i for i in found.merged for c in range(i.start, i.stop) if c % 11 in (0, 3, 4)]
    assert skipped == []


def test_a_closing_lap_that_a_restart_undid_is_trained_on_from(tmp_path: Path) -> None:
    """The phase goes from CLOSING back to TRAINING: the learner steps again."""
    spec = tiny_spec(budget_tokens=16 * 200)
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with OuterServer(tmp_path / "run") as server:
        link = EchoLink(server)
        learner = Learner("a", TinyProgram(), link, link.describe(), pace_s=0.002)
        stop = threading.Event()
        done = threading.Thread(target=lambda: learner.run(stop), daemon=True)
        done.start()
        _until(lambda: server.status().tokens_trained > 16 * 20)
        link.tell(Progress(30, 16 * 30, Phase.CLOSING, 4))
        _until(lambda: link.quiet(server))
        link.tell(Progress(30, 16 * 30, Phase.TRAINING, 4))
        _until(lambda: server.status().phase is Phase.FINISHED)
        done.join(WAIT_S)
        assert not done.is_alive()


class EchoLink(DirectLink):
    """A direct link through which a test can speak as the server; the server's own progress
    notes are kept back while it does.
    """

    def __init__(self, server: OuterServer) -> None:
        super().__init__(server)
        self._on_note: Callable[[ServerNote], None] = lambda _: None
        self._told: Progress | None = None
        self._seen: list[int] = []

    def open_control(
        self, lease: Lease, on_note: Callable[[ServerNote], None], on_closed: Callable[[], None]
    ) -> Any:
        self._on_note = on_note

        def filtered(note: ServerNote) -> None:
            is_held_back = self._told is not None and self._told.phase is Phase.CLOSING
            if not (is_held_back and isinstance(note, Progress)):
                on_note(note)

        return super().open_control(lease, filtered, on_closed)

    def tell(self, progress: Progress) -> None:
        self._told = progress
        self._on_note(progress)

    def quiet(self, server: OuterServer) -> bool:
        """Whether the learner has made no step over the last 30 looks."""
        self._seen.append(server.status().learners[0].steps)
        return len(self._seen) > 30 and self._seen[-1] == self._seen[-30]


def test_a_goodbye_that_is_final_is_the_sessions_failure() -> None:
    class Fencing(ScriptedLink):
        def open_control(
            self,
            lease: Lease,
            on_note: Callable[[ServerNote], None],
            on_closed: Callable[[], None],
        ) -> DeadLine:
            on_note(Goodbye(RefusalCode.FENCED, "another process joined"))
            return super().open_control(lease, on_note, on_closed)

    session = _session(Fencing())
    session.start(threading.Event(), WAIT_S)
    _until(lambda: session.failure is not None)
    session.stop("done")
    assert isinstance(session.failure, RefusedError)
    assert session.failure.code is RefusalCode.FENCED
