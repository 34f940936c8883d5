"""Who takes part in a merge, and with what share."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from outer_server.core.state import ContributionMeta, MergeOrder, Participant


def raw_weight(tokens: int, steps: int) -> float:
    """tokens * (tokens / steps): tokens times their rate (Decoupled DiLoCo, section 3)."""
    return tokens * (tokens / steps)


def bounded_shares(weights: Sequence[float], bound: float) -> tuple[float, ...]:
    """Shares that sum to 1, after no weight is above `bound` times the (lower) median weight.

    The bound keeps a learner that returns from a long partition from dragging
    everyone to where it alone has been.
    """
    limit = bound * median_low(weights)
    bounded = [min(weight, limit) for weight in weights]
    total = sum(bounded)
    return tuple(weight / total for weight in bounded)


def merge_order(
    fragment: int, version: int, arrived: Sequence[ContributionMeta], weight_bound: float
) -> MergeOrder:
    """The order to merge `arrived` (not empty), by learner name.

    Several contributions of one learner (a late one and a fresh one) count as
    one, with tokens and steps summed, oldest base first. The result does not
    depend on the order of `arrived`.
    """
    by_learner: dict[str, list[ContributionMeta]] = {}
    for meta in sorted(arrived, key=lambda m: (m.key.learner, m.key.base_version)):
        by_learner.setdefault(meta.key.learner, []).append(meta)
    weights = [
        raw_weight(sum(m.tokens for m in metas), sum(m.steps for m in metas))
        for metas in by_learner.values()
    ]
    shares = bounded_shares(weights, weight_bound)
    participants = tuple(
        Participant(learner, tuple(metas), share)
        for (learner, metas), share in zip(by_learner.items(), shares, strict=True)
    )
    return MergeOrder(fragment, version, participants)
