"""The reference program holds to what `learner.program.Program` promises."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from fragments.errors import DataError
from learner.program import Program, Shard, StepResult
from learner.reference.alone import train_alone
from learner.reference.bigram import bigram_bits_per_byte
from learner.reference.corpus import Corpus, Document, build_corpus
from learner.reference.program import ReferenceProgram, build
from learner.reference.settings import ReferenceSettings

TINY = {"width": 16, "depth": 1, "heads": 1, "seq_len": 16, "batch_size": 8, "eval_windows": 24}
HALF = jnp.float32(0.5)


class Recorded(ReferenceProgram):
    """Notes the progress and the cursor of every step."""

    def __init__(self, settings: ReferenceSettings, corpus: Corpus, seed: int) -> None:
        super().__init__(settings, corpus, seed)
        self.progress: list[float] = []
        self.cursors: list[int] = []

    def batch(self, shard: Shard, cursor: int) -> Any:
        self.cursors.append(cursor)
        return super().batch(shard, cursor)

    def step(self, params: Any, inner: Any, batch: Any, progress: Any) -> StepResult:
        self.progress.append(float(progress))
        return super().step(params, inner, batch, progress)


def make(seed: int = 0, **changes: Any) -> Recorded:
    documents = [
        Document(f"{i:03d}", (f"the cat {i} sat on the mat; " * 40).encode()) for i in range(50)
    ]
    settings = ReferenceSettings.model_validate({**TINY, **changes})
    return Recorded(settings, build_corpus("cats", documents), seed)


def shapes(tree: Any) -> list[tuple[str, tuple[int, ...]]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path), leaf.shape) for path, leaf in leaves]


@pytest.fixture(scope="module")
def program() -> Recorded:
    return make()


@pytest.fixture(scope="module")
def other_seed() -> ReferenceProgram:
    return make(seed=9)


def start(program: Program) -> tuple[Any, Any]:
    params = program.init_params(3)
    return params, program.init_inner(params)


def train(program: Program, state: tuple[Any, Any], cursors: range) -> tuple[Any, Any]:
    for cursor in cursors:
        state = program.step(*state, program.batch(Shard(0, 2), cursor), HALF)[:2]
    return state


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_is_a_program(program: ReferenceProgram) -> None:
    as_program: Program = program
    assert as_program.tokens_per_step == 8 * 16
    assert as_program.loss_unit == "bits per byte"
    assert program.data_digest == program.corpus.manifest_digest


def test_parameters_are_floating_point_and_pure_in_the_seed(program: ReferenceProgram) -> None:
    params = program.init_params(3)
    assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(params))
    assert bits(params) == bits(program.init_params(3))
    assert bits(params) != bits(program.init_params(4))


def test_only_the_embedding_is_averaged(program: ReferenceProgram) -> None:
    leaves = jax.tree_util.tree_flatten_with_path(program.init_params(0))[0]
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert [path for path in paths if program.averaged(path)] == [".embedding.weight"]


def test_a_batch_is_bytes_and_pure(program: ReferenceProgram) -> None:
    batch = program.batch(Shard(1, 2), 5)
    assert batch.shape == (8, 17)
    assert batch.dtype == np.uint8
    np.testing.assert_array_equal(make().batch(Shard(1, 2), 5), batch)
    assert (program.batch(Shard(0, 2), 5) != batch).any()
    assert (program.batch(Shard(1, 2), 6) != batch).any()
    assert (make(seed=1).batch(Shard(1, 2), 5) != batch).any()


def test_a_step_keeps_its_inputs_and_repeats_to_the_bit(program: ReferenceProgram) -> None:
    state, batch = start(program), program.batch(Shard(0, 1), 0)
    before = bits(state)
    first = program.step(*state, batch, HALF)
    again = program.step(*state, batch, HALF)
    assert isinstance(first, StepResult)
    assert first.loss.dtype == jnp.float32
    assert first.loss.shape == ()
    assert bits(first) == bits(again)
    assert bits(state) == before
    assert shapes(first.params) == shapes(state[0])
    assert shapes(first.inner) == shapes(state[1])


def test_a_step_is_its_two_halves(program: ReferenceProgram) -> None:
    params, inner = start(program)
    batch = program.batch(Shard(0, 1), 0)
    whole = program.step(params, inner, batch, HALF)
    loss, gradient = jax.jit(program.gradient)(params, batch)
    halves = jax.jit(program.updated)(params, inner, gradient, HALF)
    assert float(loss) == pytest.approx(float(whole.loss))
    for one, other in zip(jax.tree.leaves(halves), jax.tree.leaves(whole[:2]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_the_step_follows_progress(program: ReferenceProgram) -> None:
    state, batch = start(program), program.batch(Shard(0, 1), 0)
    idle = program.step(*state, batch, jnp.float32(0.0))
    assert bits(idle.params) == bits(state[0])  # the warm-up begins at zero
    late = program.step(*state, batch, jnp.float32(1.0))
    assert bits(late.params) != bits(program.step(*state, batch, HALF).params)


def test_a_resumed_learner_ends_with_the_same_bits(program: ReferenceProgram) -> None:
    whole = train(program, start(program), range(6))
    half = train(program, start(program), range(3))
    saved = jax.tree.map(np.asarray, half)
    resumed = train(program, jax.tree.map(jnp.asarray, saved), range(3, 6))
    assert bits(resumed) == bits(whole)


def test_evaluation_is_of_one_fixed_sample(
    program: ReferenceProgram, other_seed: ReferenceProgram
) -> None:
    params, inner = start(program)
    loss = program.evaluate(params)
    assert loss == program.evaluate(params)
    assert loss == other_seed.evaluate(params)
    assert 7.0 < loss < 9.5
    trained = train(program, (params, inner), range(40))[0]
    assert program.evaluate(trained) < loss - 1.0


def test_the_held_out_text_is_never_trained_on(program: ReferenceProgram) -> None:
    rows = {
        row.tobytes()
        for cursor in range(len(program.corpus.train) // program.tokens_per_step + 1)
        for row in program.batch(Shard(0, 1), cursor)
    }
    text = program.corpus.train.tobytes()
    assert all(row in text for row in rows)


def test_the_bigram_bar_is_measured_on_the_same_sample(
    program: ReferenceProgram, other_seed: ReferenceProgram
) -> None:
    assert 0.3 < program.bigram_loss() < 3.0
    assert program.bigram_loss() == other_seed.bigram_loss()


def test_bigram_equals_counting_by_hand() -> None:
    rng = np.random.default_rng(0)
    train_text = rng.integers(0, 5, 400).astype(np.uint8)
    windows = rng.integers(0, 6, (7, 9)).astype(np.uint8)
    pairs = list(pairwise(train_text.tolist()))
    total = 0.0
    for row in windows.tolist():
        for a, b in pairwise(row):
            after_a = sum(1 for pair in pairs if pair[0] == a)
            total -= np.log2((pairs.count((a, b)) + 0.5) / (after_a + 0.5 * 256))
    loss = bigram_bits_per_byte(train_text, windows, add_k=0.5)
    assert loss == pytest.approx(total / (7 * 8), rel=1e-12)


def test_alone_trains_on_the_tokens_given_over_its_own_progress(program: Recorded) -> None:
    tokens = 20 * program.tokens_per_step
    program.cursors.clear()
    program.progress.clear()
    loss = train_alone(program, tokens - 1, seed=3)
    assert program.cursors == list(range(20))
    np.testing.assert_allclose(program.progress, np.arange(20) / 20, rtol=1e-6)
    assert loss < program.evaluate(program.init_params(3))
    assert loss == train_alone(program, tokens, seed=3)


def test_alone_refuses_no_tokens(program: ReferenceProgram) -> None:
    with pytest.raises(ValueError, match="positive"):
        train_alone(program, 0, seed=0)


def test_build_reads_settings_and_a_users_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {index}\n" for index in range(5000)))
    built = build(TINY, str(path), seed=1)
    assert built.settings == ReferenceSettings.model_validate(TINY)
    assert len(built.corpus.train) + len(built.corpus.held_out) == path.stat().st_size
    assert "width=16" in built.identity
    assert make(heads=2).identity != make(heads=1).identity


def test_the_default_text_is_the_standard_library() -> None:
    assert build(TINY, None, seed=0).corpus.name == "python-standard-library"


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda: build({"widht": 3}, None, 0), ValidationError, "widht"),
        (lambda: build({"width": 20, "heads": 3}, None, 0), ValidationError, "even head size"),
        (lambda: build({"depth": 0}, None, 0), ValidationError, "depth"),
        (lambda: make(seq_len=100_000), DataError, "do not fill one window"),
        (lambda: make().batch(Shard(0, 10**6), 0), DataError, "too small for 1000000 learners"),
    ],
)
def test_what_cannot_work_is_said(
    attempt: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attempt()
