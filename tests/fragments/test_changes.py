"""Every setting of a run either may be changed in mid-run, or says why not."""

from __future__ import annotations

import pytest

from fragments.changes import CHANGEABLE, FIXED, changed, keys_of, value_of
from fragments.errors import SettingsError
from fragments.runspec import IntervalStage, RunSpec

SPEC = RunSpec(run_id="r", max_learners=4)
NEW = {
    "budget_tokens": "5",
    "sync_interval": "0:4,0.5:9",
    "quorum": "3",
    "min_learners": "2",
    "max_open_rounds": "3",
    "staleness_bound": "1",
    "weight_bound": "1.5",
    "closing_lap_s": "7.5",
    "closing_lap": "step",
    "merge": "average",
    "asked": "reached",
    "late": "drop",
    "closing.rule": "paper",
    "closing.gamma": "0.25",
    "closing.tau_steps": "5",
    "outer.learning_rate": "0.25",
    "outer.momentum": "0.5",
    "outer.nesterov": "False",
}


def test_no_setting_is_forgotten() -> None:
    for key in keys_of():
        is_fixed = key in FIXED or key.partition(".")[0] in FIXED
        assert (key in CHANGEABLE) != is_fixed, key
    assert set(keys_of()) >= CHANGEABLE


@pytest.mark.parametrize("key", sorted(CHANGEABLE))
def test_what_may_be_changed_is_and_nothing_else(key: str) -> None:
    before = {each: value_of(SPEC, each) for each in keys_of()}
    spec = changed(SPEC, [(key, NEW[key])])
    after = {each: value_of(spec, each) for each in keys_of()}
    assert after == before | {key: NEW[key]}
    assert value_of(spec, key) != before[key]


def test_several_are_checked_as_a_whole() -> None:
    spec = changed(SPEC, [("closing.rule", "paper"), ("closing.gamma", "0"), ("quorum", "2")])
    assert (spec.closing.rule, spec.closing.gamma, spec.quorum) == ("paper", 0.0, 2)
    assert changed(SPEC, [("sync_interval", "9")]).sync_interval == (
        IntervalStage(from_share=0.0, steps=9),
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ([("quorun", "2")], "'quorun' is no setting of a run: did you mean quorum?"),
        ([("x", "2")], "those that can be changed are asked, budget_tokens"),
        ([("codec.block", "2")], "codec.block cannot be changed.*learners have read it"),
        ([("outer.factory", "optax:adam")], "another state"),
        ([("closing", "paper")], "'closing' is no setting"),
        ([("run_id", "s")], "it says what is trained"),
        ([("quorum", "two")], "quorum 'two': Input should be a valid integer"),
        ([("quorum", "5")], "quorum is above max_learners"),
        ([("min_learners", "2"), ("late", "maybe")], "late 'maybe': Input should be 'join' or"),
        ([("outer.momentum", "nan")], "outer.momentum"),
        ([("sync_interval", "0.5:4")], "stages must begin at share 0"),
    ],
)
def test_what_may_not_be_changed_is_a_sentence(
    changes: list[tuple[str, str]], sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        changed(SPEC, changes)


def test_a_setting_that_is_given_twice_is_refused() -> None:
    with pytest.raises(SettingsError, match="quorum is given more than once"):
        changed(SPEC, (("quorum", "2"), ("quorum", "1")))
