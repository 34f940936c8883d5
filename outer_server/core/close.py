"""When a round closes: one decision with its reason, and the learned deadlines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from fragments.records import Phase
from fragments.runspec import ClosingSettings
from outer_server.core.state import Averages, LearnerRecord, Round, RunState, Timing

DEVIATIONS = 4.0
"""A learner is late past mean + this many deviations (RFC 6298's K)."""

GRANULARITY_S = 0.05
"""Added to every deadline: below this, differences are scheduling noise."""

MISSES_BEFORE_IGNORED = 3
"""Nobody waits for a learner that missed this many rounds in a row, until it answers within the
longest wait of a round again: an answer that takes longer comes late to the next round as well, and
to wait for it lengthens every round for nothing (docs/study.md, `late_joined`)."""


class Verdict(StrEnum):
    """What becomes of a collecting round."""

    WAIT = "wait"
    CLOSE = "close"
    ABANDON = "abandon"


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, a sentence why, and the time at which to look again if nothing happens."""

    verdict: Verdict
    reason: str
    look_again_s: float = math.inf


def observe(timing: Timing, sample_s: float, longest_s: float = math.inf) -> Timing:
    """`timing` after an answer took `sample_s` (RFC 6298, section 2: alpha 1/8, beta 1/4).

    One within `longest_s` makes the learner worth waiting for again.
    """
    missed_in_a_row = 0 if sample_s <= longest_s else timing.missed_in_a_row
    if timing.samples == 0:
        return Timing(sample_s, sample_s / 2, 1, missed_in_a_row)
    deviation_s = 0.75 * timing.deviation_s + 0.25 * abs(timing.mean_s - sample_s)
    mean_s = 0.875 * timing.mean_s + 0.125 * sample_s
    return Timing(mean_s, deviation_s, timing.samples + 1, missed_in_a_row)


def missed(timing: Timing) -> Timing:
    """`timing` after a round closed without this learner."""
    return replace(timing, missed_in_a_row=timing.missed_in_a_row + 1)


def deadline_s(timing: Timing) -> float:
    """Seconds after the ask at which an answer is late; infinite before the first sample."""
    if timing.samples == 0:
        return math.inf
    return timing.mean_s + DEVIATIONS * timing.deviation_s + GRANULARITY_S


def longest_wait_steps(state: RunState) -> int:
    """Steps of the clock after which a round with K_eff answers waits for nobody."""
    return max(1, state.slots.interval // 2)


def smoothed(average_s: float, sample_s: float) -> float:
    """A moving average with weight 1/8 for the newest sample; the first sample is taken whole."""
    return sample_s if average_s == 0.0 else 0.875 * average_s + 0.125 * sample_s


def paper_grace_s(averages: Averages, closing: ClosingSettings) -> float:
    """g = max(0, gamma * (tau * xi_step - (xi_quorum + xi_sync))), in seconds (Decoupled
    DiLoCo, section 3).
    """
    overlap_s = closing.tau_steps * averages.step_s
    return max(0.0, closing.gamma * (overlap_s - (averages.quorum_s + averages.sync_s)))


def missing(state: RunState, round_: Round) -> tuple[LearnerRecord, ...]:
    """Asked learners that are live and have neither answered nor declined."""
    done = round_.answered | round_.declined
    return tuple(
        record
        for record in state.live_learners
        if record.name in round_.asked and record.name not in done
    )


def contributors(state: RunState, fragment: int) -> frozenset[str]:
    """Names that count towards the quorum: with a contribution on the fragment's current version.

    An older one that waits is merged with the next closing, but brings none about: with K = 1 a
    late answer of the round before would otherwise close this one before anybody has answered.
    """
    held = state.fragments[fragment]
    return frozenset(
        meta.key.learner for meta in held.arrived if meta.key.base_version.number == held.version
    )


def decide(state: RunState, round_: Round, now_s: float, *, bound_reached: bool) -> Decision:
    """Whether a collecting round closes now.

    It closes once nobody is missing (`missing`), with one answer or more; without any it is
    abandoned. With K_eff answers (`contributors` says whose count) and somebody missing it closes

    - by the learned rule, when each missing one is past its own deadline or has missed
      `MISSES_BEFORE_IGNORED` rounds; in the closing lap only the latter;
    - by the paper's rule, when the grace window after the K_eff-th answer is over;
    - by either, once `bound_reached`: H/2 steps after opening, at its fragment's next slot, or at
      the end of the closing lap.

    Below K_eff it waits, whatever the time; who calls this abandons it at those last two moments.
    """
    answered = len(contributors(state, round_.fragment))
    absent = missing(state, round_)
    if not absent:
        if answered == 0:
            reason = "every asked learner declined, is gone or answered on an older version"
            return Decision(Verdict.ABANDON, reason)
        return Decision(Verdict.CLOSE, "every asked live learner has answered")
    if answered < state.quorum_effective:
        return Decision(Verdict.WAIT, f"{answered} of {state.quorum_effective} answers are in")
    if bound_reached:
        return Decision(Verdict.CLOSE, "the longest wait of a round is over")
    if state.spec.closing.rule == "paper":
        return _within_grace(state, round_, now_s)
    patient = [r for r in absent if r.timing.missed_in_a_row < MISSES_BEFORE_IGNORED]
    if state.phase is Phase.CLOSING and patient:
        # The lap asks for all fragments at once, so answers queue up on each line and take longer
        # than any deadline was learned from; and nobody trains on meanwhile, so nothing is lost.
        return Decision(Verdict.WAIT, f"the closing lap waits for {len(patient)} asked learners")
    until_s = _latest(patient, round_.opened_at_s)
    if now_s >= until_s:
        names = ", ".join(record.name for record in absent)
        return Decision(Verdict.CLOSE, f"past the learned deadline of {names}")
    return Decision(Verdict.WAIT, f"waiting for {len(absent)} asked learners", until_s)


def _within_grace(state: RunState, round_: Round, now_s: float) -> Decision:
    grace_s = paper_grace_s(state.averages, state.spec.closing)
    quorum_at_s = round_.opened_at_s if round_.quorum_at_s is None else round_.quorum_at_s
    if now_s >= quorum_at_s + grace_s:
        return Decision(Verdict.CLOSE, f"the grace window of {grace_s:.3f} s is over")
    return Decision(Verdict.WAIT, "within the grace window", quorum_at_s + grace_s)


def _latest(records: Iterable[LearnerRecord], opened_at_s: float) -> float:
    return max((opened_at_s + deadline_s(record.timing) for record in records), default=-math.inf)


def note_misses(
    learners: Mapping[str, LearnerRecord], absent: Iterable[LearnerRecord]
) -> dict[str, LearnerRecord]:
    """All records, those of `absent` with one more miss."""
    gone = {r.name: replace(r, timing=missed(r.timing)) for r in absent}
    return {**learners, **gone}
