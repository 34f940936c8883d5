"""A map of regions is read as it is written, and what makes no sense is told in a sentence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from cli.settings import load_settings
from cli.verbs import load_all, load_verb
from cli.verbs.run import make_plan
from fragments.errors import SettingsError
from harness.link import LinkShape
from harness.plan import LocalPlan, islands_of
from harness.regions import load_map

TWO = """
[regions.us-east]
rate_mbit = 20
delay_ms = 40

[regions.asia]
rate_mbit = 5.5
speed = 0.5

[regions.here]
"""


def _map(directory: Path, text: str) -> Path:
    path = directory / "map.toml"
    path.write_text(text, encoding="utf-8")
    return path


def _plan(words: str) -> LocalPlan:
    settings: Any = load_settings(load_verb("run"), load_all(), words.split(), {})
    return make_plan(settings)


def test_a_region_is_a_learner_with_its_link_and_its_pace(tmp_path: Path) -> None:
    us, asia, here = islands_of(load_map(_map(tmp_path, TWO)), 0.2)
    assert (us.name, us.pace_s, us.link) == ("us-east", 0.2, LinkShape(20, 0.04))
    assert (asia.name, asia.pace_s, asia.link) == ("asia", 0.4, LinkShape(5.5, 0.0))
    assert (here.name, here.pace_s, here.link) == ("here", 0.2, None)


def test_a_link_may_be_long_without_being_thin(tmp_path: Path) -> None:
    (far,) = islands_of(load_map(_map(tmp_path, "[regions.far]\ndelay_ms = 100\n")), 0.0)
    assert far.link == LinkShape(math.inf, 0.1)


def test_a_run_takes_its_learners_from_the_map(tmp_path: Path) -> None:
    plan = _plan(f"--out {tmp_path} --map {_map(tmp_path, TWO)} --preset demo")
    assert [island.name for island in plan.islands] == ["us-east", "asia", "here"]
    assert plan.spec.max_learners == 3
    assert plan.islands[1].pace_s == 2 * plan.islands[0].pace_s > 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the map has no regions: give each a table"),
        ("[regions]\n", "the map has no regions: give each a table"),
        ("[regions]\na = 5\n", "regions.a: is no region: write a table [regions.a]"),
        ("[regions.a]\nrate_mbit = nan\n", "regions.a.rate_mbit: Input should be a finite"),
        (
            "[regions.a]\nrate_mbits = 5\n",
            "regions.a.rate_mbits: no such setting: did you mean rate_mbit?",
        ),
        ("[regions.a]\nlatency = 5\n", "no such setting; there are rate_mbit, delay_ms, speed"),
        ("[region.a]\n", "region: no such setting: did you mean regions?"),
        ("[regions.a]\nrate_mbit = 0\n", "regions.a.rate_mbit: "),
        ("[regions.a]\nrate_mbit = inf\n", "regions.a.rate_mbit: "),
        ("[regions.a]\ndelay_ms = -1\n", "regions.a.delay_ms: "),
        ("[regions.a]\nspeed = 0\n", "regions.a.speed: "),
        ("[regions.'a b']\n", "letters, digits"),
        ("regions = 3\n", "the map has no regions: give each a table"),
        ("[regions.a\n", "is not a TOML file"),
    ],
)
def test_what_makes_no_sense_is_told_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_map(_map(tmp_path, text))
    assert told in str(refused.value)
    assert str(tmp_path / "map.toml") in str(refused.value)


def test_a_map_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read the map .*nowhere\.toml"):
        load_map(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--learners 3", "leave out --learners"),
        ("--pace-s 0.1 --slow-factor 2", "leave out --slow-factor"),
        ("--pace-s 0", "regions of different speeds need a pace"),
    ],
)
def test_a_run_with_a_map_is_told_what_contradicts_it(
    tmp_path: Path, words: str, told: str
) -> None:
    with pytest.raises(SettingsError, match=told):
        _plan(f"--out {tmp_path} --map {_map(tmp_path, TWO)} {words}")
