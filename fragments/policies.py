"""Known algorithms as settings of a run. Imports neither jax nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fragments.overlay import overlay
from fragments.runspec import RunSpec

Policy = Literal["decoupled", "diloco", "streaming"]


def policy_settings(policy: Policy, max_learners: int) -> dict[str, Any]:
    """What `policy` asks of a run of at most `max_learners`, over the defaults of `RunSpec`.

    "decoupled": Decoupled DiLoCo (arXiv 2604.21428), which the defaults are. "diloco": synchronous
    DiLoCo (arXiv 2311.08105): all of the model at once, all live learners must answer, and nobody
    steps while it is on its way. "streaming": Streaming DiLoCo (arXiv 2501.18512): fragments, all
    must answer, two steps of overlap, and what was trained meanwhile keeps half of its weight. Both
    take the plain average of the pseudo-gradients.
    """
    match policy:
        case "decoupled":
            return {}
        case "diloco":
            overlap = {"max_overlap_steps": 0}
            whole = {"quorum": max_learners, "fragments": 1, "adoption": overlap}
            return {**whole, "merge": "average"}
        case "streaming":
            mixing = {"mode": "alpha", "alpha": 0.5, "max_overlap_steps": 2}
            return {"quorum": max_learners, "adoption": mixing, "merge": "average"}


def spec_of(
    given: Mapping[str, Any], policy: Policy | None, weak: Mapping[str, Any] | None = None
) -> RunSpec:
    """The settings of a run: `given` over those of the policy over `weak`.

    Keys that are no settings of a run are left out. Raises pydantic's ValidationError.
    """
    given = {name: value for name, value in given.items() if name in RunSpec.model_fields}
    below = dict(weak or {})
    if policy is not None:
        most = RunSpec.model_validate(overlay(below, given)).max_learners
        below = overlay(below, policy_settings(policy, most))
    return RunSpec.model_validate(overlay(below, given))
