"""How long a run is, in rounds a fragment, and the outer step that suits such a length.

The best pair of outer learning rate and momentum moves with the number of rounds, for a momentum
needs time to pay back; by little between 12 and 50 rounds a fragment, which is what was tried,
from warm starts and on three seeds (docs/study.md: `rates_tiny`, `rates_short`, `rates_long`). At
12 rounds .5/.7 ends 0.4 ± 0.6% below .5/.8, at 25 rounds level with it, at 50 0.5 ± 1.1% above: a
hint, no more.
"""

from __future__ import annotations

from typing import NamedTuple

from fragments.runspec import OuterSettings, RunSpec


class Pair(NamedTuple):
    """Nesterov's eta and mu, and the number of rounds a fragment up to which they were best."""

    learning_rate: float
    momentum: float
    up_to_rounds: float


PAIRS = (Pair(0.5, 0.7, 18), Pair(0.5, 0.8, float("inf")))


def rounds_a_fragment(spec: RunSpec, tokens_per_step: int, learners: int) -> float:
    """Rounds of each fragment in a run of so many equally fast learners."""
    steps = spec.budget_tokens / (tokens_per_step * learners)
    ends = [stage.from_share for stage in spec.sync_interval[1:]] + [1.0]
    return sum(
        steps * (end - stage.from_share) / stage.steps
        for stage, end in zip(spec.sync_interval, ends, strict=True)
    )


def best_pair(rounds: float) -> Pair:
    """The best of what the study tried at so many rounds a fragment, or within the spread of it."""
    return next(pair for pair in PAIRS if rounds <= pair.up_to_rounds)


def advice(spec: RunSpec, tokens_per_step: int, learners: int) -> tuple[str, ...]:
    """What the study has to say of such a run, in sentences: its outer step where the study would
    take another, and how it had best begin.
    """
    sentences = []
    rounds = rounds_a_fragment(spec, tokens_per_step, learners)
    pair, outer = best_pair(rounds), spec.outer
    # Another optimizer, or another kind of momentum, has rates of its own.
    if not outer.factory and outer.nesterov and not _same(outer, pair):
        sentences.append(
            f"with {learners} learners this run has about {rounds:.0f} rounds a fragment; of what"
            f" the study tried (12 to 50 rounds, warm starts, three seeds), --outer.learning-rate"
            f" {pair.learning_rate:g} --outer.momentum {pair.momentum:g} was the best at such a"
            f" length, or level with it; this run has {outer.learning_rate:g} and"
            f" {outer.momentum:g}"
        )
    if learners > 1:
        sentences.append(
            "averaging models that have not found their way yet costs most: from random weights,"
            " start one learner, and the others when it has trained a tenth to a fifth of the"
            " tokens (docs/study.md says what that gains, and in which time)"
        )
    return tuple(sentences)


def _same(outer: OuterSettings, pair: Pair) -> bool:
    return (outer.learning_rate, outer.momentum) == (pair.learning_rate, pair.momentum)
