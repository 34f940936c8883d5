from __future__ import annotations

import pytest

from fragments.policies import Policy, spec_of
from fragments.runspec import AdoptionSettings, RunSpec


def test_without_a_policy_the_defaults_are_decoupled() -> None:
    assert spec_of({}, None) == spec_of({}, "decoupled") == RunSpec()


def test_synchronous_diloco_waits_for_all_with_the_whole_model() -> None:
    spec = spec_of({"max_learners": 3, "data": "x"}, "diloco")
    assert (spec.quorum, spec.max_learners, spec.fragments) == (3, 3, 1)
    assert spec.adoption == AdoptionSettings(max_overlap_steps=0)


@pytest.mark.parametrize("policy", ["diloco", "streaming"])
def test_what_is_given_is_stronger_and_what_lies_below_is_weaker(policy: Policy) -> None:
    given = {"quorum": 2, "adoption": {"max_overlap_steps": 5}}
    spec = spec_of(given, policy, {"max_learners": 8, "fragments": 6, "sync_interval": 12})
    assert (spec.quorum, spec.adoption.max_overlap_steps) == (2, 5)
    assert spec.fragments == (1 if policy == "diloco" else 6)
    assert spec.adoption.mode == ("overwrite" if policy == "diloco" else "alpha")
    assert spec.interval_steps(0) == 12


@pytest.mark.parametrize("policy", ["diloco", "streaming"])
def test_what_the_papers_average_plainly_is_averaged_unless_it_is_said_otherwise(
    policy: Policy,
) -> None:
    assert spec_of({}, policy).merge == "average"
    assert spec_of({"merge": "rda"}, policy).merge == "rda"
    assert spec_of({}, "decoupled").merge == "rda"
