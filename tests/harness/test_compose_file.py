"""A run in containers: what its compose file says, and what is refused before anything is made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cli.settings import load_settings
from cli.verbs import load_all, load_verb
from cli.verbs.chaos import plan_of
from cli.verbs.run import make_plan
from fragments.errors import SettingsError
from harness.compose import WAN, Mounted, Project
from harness.contained import Containers
from harness.environment import command
from harness.link import LinkShape
from harness.plan import SERVER
from harness.processes import Command


def project(out: Path) -> Project:
    return Project("diloco-1", "image", out, (7, 8), 1234, out / "links", Mounted.of(str(out)))


def one(name: str, out: Path) -> Command:
    return Command(name, command("learn", "--name", "a$b"), out / "log", {"KEY": "v$w"})


def test_containers_see_the_run_and_its_data_and_end_together(tmp_path: Path) -> None:
    file = project(tmp_path).file([one(SERVER, tmp_path), one("us-east", tmp_path)])
    assert list(file["services"]) == [WAN, SERVER, "us-east"]
    for name, service in file["services"].items():
        assert service["container_name"] == f"diloco-1-{name}"
        assert (service["image"], service["user"], service["restart"]) == ("image", "7:8", "no")
        assert service.get("pid") == (None if name == WAN else f"service:{WAN}")
        own, data = service["volumes"]
        assert own["source"] == own["target"] == str(tmp_path)
        assert (data["source"], data["read_only"]) == (str(tmp_path), True)
    # Whatever Python this is, the image has its own; and Compose reads no variable here.
    us = file["services"]["us-east"]
    assert us["entrypoint"] == ["python3"]
    assert us["command"] == ["-P", "-m", "cli", "learn", "--name", "a$$b"]
    assert us["environment"]["KEY"] == "v$$w"
    # One port of this machine, of its loopback.
    ports = {name: service.get("ports") for name, service in file["services"].items()}
    assert ports == {WAN: None, SERVER: ["127.0.0.1:1234:7700"], "us-east": None}


@pytest.mark.parametrize("name", [WAN, SERVER])
def test_a_learner_has_no_name_that_another_container_has(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=f"cannot be called {name}"):
        project(tmp_path).file([one(SERVER, tmp_path), one(name, tmp_path)])


def test_data_is_found_in_a_container_where_it_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "one.txt").touch()
    found = {what: Mounted.of(str(tmp_path / what)) for what in ("texts", "one.txt", "te*/*.txt")}
    assert found == {
        "texts": Mounted(tmp_path / "texts", "/data"),
        "one.txt": Mounted(tmp_path, "/data/one.txt"),
        "te*/*.txt": Mounted(tmp_path, "/data/te*/*.txt"),
    }


def test_without_an_engine_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match="no container engine here: install docker"):
        Containers("image", tmp_path, {"us-east": LinkShape()})
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SettingsError, match="on Linux alone"):
        Containers("image", tmp_path, {"us-east": LinkShape()})


def _settings(verb: str, words: str) -> Any:
    return load_settings(load_verb(verb), load_all(), words.split(), {})


def test_both_verbs_take_the_image(tmp_path: Path) -> None:
    chaos = plan_of(_settings("chaos", "--containers one --mtbf-s 60"), tmp_path)
    assert chaos.image == "one"
    run = make_plan(_settings("run", f"--out {tmp_path} --preset demo --containers one"))
    assert (run.image, run.baselines) == ("one", False)
