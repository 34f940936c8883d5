"""Flags are stronger than the environment, that than the file, and none is misread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cli.settings import load_settings
from cli.verbs import NAMES, load_all, load_verb
from cli.verbs.init import run_spec
from fragments.errors import SettingsError
from fragments.runspec import IntervalStage


def load(verb: str, argv: str = "", environ: Mapping[str, str] | None = None) -> Any:
    return load_settings(load_verb(verb), load_all(), argv.split(), environ or {})


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path / "d.toml", "[learn]\nname = 'of-file'\npace_s = 3.0\n")
    environ = {"DILOCO_CONFIG": str(file)}
    assert load("learn", "", environ).pace_s == 3.0
    environ["DILOCO_PACE_S"] = "2.0"
    assert load("learn", "", environ).pace_s == 2.0
    assert load("learn", "--pace-s 1", environ).pace_s == 1.0
    assert load("learn", "", environ).name == "of-file"
    assert load("learn", "--name of-flag", environ).name == "of-flag"
    assert load("learn", "--name x").pace_s == 0.0


def test_a_variable_or_section_of_the_verb_beats_the_common_one(tmp_path: Path) -> None:
    file = write(tmp_path / "d.toml", "address = 'a:1'\n[status]\naddress = 'b:2'\n")
    config = f"--config {file}"
    assert load("learn", f"--name x {config}").address == "a:1"
    assert load("status", config).address == "b:2"
    environ = {"DILOCO_ADDRESS": "c:3", "DILOCO_STATUS_ADDRESS": "d:4"}
    assert load("learn", f"--name x {config}", environ).address == "c:3"
    assert load("status", config, environ).address == "d:4"


def test_sources_are_merged_key_by_key_within_a_table(tmp_path: Path) -> None:
    file = write(tmp_path / "d.toml", "[init.outer]\nlearning_rate = 0.7\nmomentum = 0.6\n")
    environ = {"DILOCO_INIT_OUTER__MOMENTUM": "0.5"}
    settings = load("init", f"r --config {file} --no-outer.nesterov", environ)
    assert settings.outer.learning_rate == 0.7
    assert settings.outer.momentum == 0.5
    assert settings.outer.nesterov is False


def test_the_run_settings_of_init_reach_the_spec_in_all_their_forms() -> None:
    settings = load(
        "init",
        "runs/x --budget-tokens 5000 --sync-interval 0:4,0.25:24 --program.settings width=64"
        " --program.settings kind=wide --if-missing",
    )
    spec = run_spec(settings)
    assert settings.run_dir == Path("runs/x")
    assert settings.if_missing is True
    assert spec.budget_tokens == 5000
    assert spec.sync_interval == (
        IntervalStage(from_share=0.0, steps=4),
        IntervalStage(from_share=0.25, steps=24),
    )
    assert spec.program.settings == {"width": 64, "kind": "wide"}


def test_a_place_can_be_filled_from_the_environment() -> None:
    assert load("serve", "", {"DILOCO_SERVE_RUN_DIR": "runs/y"}).run_dir == Path("runs/y")


def test_lists_from_flags_and_environment() -> None:
    assert load("run", "--out o --kill a@1 b@2 --kill c@3").kill == ("a@1", "b@2", "c@3")
    assert load("run", "--out o", {"DILOCO_KILL": "a@1, b@2"}).kill == ("a@1", "b@2")


def test_an_empty_variable_counts_as_unset() -> None:
    assert load("learn", "--name x", {"DILOCO_PACE_S": ""}).pace_s == 0.0


def test_words_for_two_word_verbs(tmp_path: Path) -> None:
    file = write(tmp_path / "d.toml", "[bench.pace]\npairs = 3\n")
    assert load("bench pace", f"--config {file}").pairs == 3
    assert load("bench pace", "", {"DILOCO_BENCH_PACE_PAIRS": "5"}).pairs == 5
    # Its section lies in that of another verb, whose own keys are not its.
    file = write(tmp_path / "b.toml", "[bench]\nlaps = 2\n[bench.pace]\npairs = 3\n")
    assert load("bench", f"--config {file}").laps == 2
    assert load("bench pace", f"--config {file}").pairs == 3
    assert load("status", f"--config {file}").json_ is False


@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        ("--adress x:1", "--address"),
        ("--pace 1", "--pace-s"),
        ("--link.call 3", "--link.call-s"),
        ("--names y", "--name"),
    ],
)
def test_an_unknown_flag_names_the_nearest(argv: str, nearest: str) -> None:
    with pytest.raises(SettingsError, match=rf"no flag .*did you mean {nearest}\?"):
        load("learn", f"--name x {argv}")


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("DILOCO_ADRESS", "DILOCO_ADDRESS"),
        ("DILOCO_LEARN_PACE", "DILOCO_LEARN_PACE_S"),
        ("DILOCO_OUTER__LERNING_RATE", "DILOCO_OUTER__LEARNING_RATE"),
        ("DILOCO_CONFIGS", "DILOCO_CONFIG"),
    ],
)
def test_an_unknown_variable_names_the_nearest(variable: str, nearest: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"{variable} names no setting: did you mean {nearest}"
    ):
        load("status", "", {variable: "1"})


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("adress = 'x:1'", "address"),
        ("[serve]\nbulkport = 3", "bulk_port"),
        ("[init.outer]\nlearning_rte = 0.1", "outer.learning_rate"),
        ("[init]\nlearning_rate = 0.1", "outer.learning_rate"),
        ("[serv]\nbulk_port = 3", "bulk_port"),
    ],
)
def test_an_unknown_key_of_the_file_names_the_nearest(
    tmp_path: Path, text: str, nearest: str
) -> None:
    file = write(tmp_path / "d.toml", text)
    with pytest.raises(SettingsError, match=rf"unknown key .*did you mean {nearest}\?"):
        load("status", f"--config {file}")


@pytest.mark.parametrize("verb", ["learn", "serve"])
def test_a_run_setting_is_refused_where_the_run_is_not_made(verb: str, tmp_path: Path) -> None:
    place = "--name x" if verb == "learn" else "runs/x"
    sentence = f"is a setting of the run: `diloco init` sets it.*`diloco {verb}` cannot change it"
    with pytest.raises(SettingsError, match=rf"--budget-tokens {sentence}"):
        load(verb, f"{place} --budget-tokens 3")
    with pytest.raises(SettingsError, match=rf"DILOCO_OUTER__MOMENTUM {sentence}"):
        load(verb, place, {"DILOCO_OUTER__MOMENTUM": "0.3"})
    with pytest.raises(SettingsError, match=rf"quorum {sentence}"):
        load(verb, f"{place} --config {write(tmp_path / 'd.toml', 'quorum = 2')}")


def test_settings_of_other_verbs_may_share_file_and_environment(tmp_path: Path) -> None:
    file = write(tmp_path / "d.toml", "pace_s = 1\n[init]\nquorum = 2\n[serve]\nbulk_port = 3\n")
    environ = {"DILOCO_INIT_BUDGET_TOKENS": "7", "DILOCO_SERVE_BULK_PORT": "4"}
    assert load("learn", f"--name x --config {file}", environ).pace_s == 1.0


def test_a_wrong_value_says_where_it_came_from(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--pace-s fast: .*number"):
        load("learn", "--name x --pace-s fast")
    with pytest.raises(SettingsError, match=r"pace_s = '-1' \(DILOCO_PACE_S\): .*greater"):
        load("learn", "--name x", {"DILOCO_PACE_S": "-1"})
    file = write(tmp_path / "d.toml", "[learn]\npace_s = [1]\n")
    with pytest.raises(SettingsError, match=rf"pace_s = \[1\] \({file}\)"):
        load("learn", f"--name x --config {file}")


@pytest.mark.parametrize(
    "flag",
    [
        *("learn --name x --cap-up-mbit", "learn --name x --cap-down-mbit"),
        *("evaluate --cap-down-mbit", "serve r --cap-receive-mbit", "serve r --cap-send-mbit"),
    ],
)
def test_a_cap_is_a_number_of_mbit_that_can_be_held(flag: str) -> None:
    verb, *words = flag.split()
    setting = words[-1].removeprefix("--").replace("-", "_")
    assert getattr(load(verb, f"{' '.join(words)} 12.5"), setting) == 12.5
    assert getattr(load(verb, " ".join(words[:-1])), setting) is None
    for text in ("0", "-3", "nan", "inf", "fast", "0.05"):
        says = rf"{words[-1]} {text}: input should be (a finite|a valid|greater than or equal)"
        with pytest.raises(SettingsError, match=says):
            load(verb, f"{' '.join(words)} {text}")


def test_what_is_missing_is_named_with_its_meaning() -> None:
    with pytest.raises(
        SettingsError, match=r"RUN_DIR is missing: directory that `diloco init` made"
    ):
        load("serve")
    with pytest.raises(SettingsError, match=r"--name TEXT is missing"):
        load("learn")
    with pytest.raises(SettingsError, match=r"expected one argument"):
        load("learn", "--name")


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.toml: No such file"):
        load("status", f"--config {tmp_path / 'gone.toml'}")
    with pytest.raises(SettingsError, match=r"bad\.toml is not a TOML file"):
        load("status", f"--config {write(tmp_path / 'bad.toml', 'a = ')}")


def test_what_init_fills_in_cannot_be_given() -> None:
    with pytest.raises(SettingsError, match=r"no flag --spec-version"):
        load("init", "r --spec-version 3")


@pytest.mark.parametrize("name", NAMES)
def test_help_tells_every_flag_with_meaning_and_default(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from cli.keys import keys_of

    with pytest.raises(SystemExit) as stop:
        load(name, "--help")
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert "examples:" in text
    for key in keys_of(load_verb(name).settings):
        assert (key.metavar if key.positional else key.flag) in text
        assert key.field.description, f"{name} {key.dotted} has no description"
