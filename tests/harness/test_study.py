"""A study on real worker processes."""

from __future__ import annotations

import json
import math
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fragments.errors import DilocoError, SettingsError
from harness.study import StudyRun, write_tables
from harness.study_check import Check, check_cell
from simulation.study.matrix import Study
from simulation.study.store import Store

STUDY = Study.model_validate(
    {
        "name": "small",
        "title": "Small",
        "seeds": [0, 1],
        "spec": {
            "budget_tokens": 640,
            "fragments": 2,
            "sync_interval": 4,
            "codec": {"block": 8},
            "program": {"factory": "tests.harness.factory:build"},
        },
        "world": {"speeds": [1, 1]},
        "versus": {"dp": "dp"},
        "rows": [{"name": "rounds"}, {"name": "dp", "kind": "data_parallel"}, {"name": "again"}],
    }
)


def test_a_study_goes_on_where_it_stopped_and_its_cells_can_be_checked(tmp_path: Path) -> None:
    lines: list[str] = []
    out, cache = tmp_path / "out", tmp_path / "cache"

    def run() -> None:
        StudyRun(STUDY, out, "the command", lines.append, 1, cache).run(threading.Event())

    run()
    assert lines[0] == "small: 6 cells, 0 there already"
    assert lines[-1].startswith("[4/4]")
    cells = sorted(path.name for path in (out / "cells" / "small").iterdir())
    assert cells == [
        "again_scratch-0.json", "again_scratch-1.json",
        "dp_scratch-0.json", "dp_scratch-1.json", "rounds_scratch-0.json", "rounds_scratch-1.json",
    ]  # fmt: skip
    table = json.loads((out / "small.json").read_text())
    assert table["command"] == "the command"
    assert table["rows"]["rounds_scratch"]["seeds"] == [0, 1]
    assert table["rows"]["dp_scratch"]["gap_to_dp_percent"] == 0.0
    assert (out / "small-gaps.png").stat().st_size > 1000
    assert (out / "small-curves.png").stat().st_size > 1000

    # A row of the same recipe has it still, so it is taken over and not made again.
    (out / "cells" / "small" / "rounds_scratch-1.json").unlink()
    lines.clear()
    run()
    assert lines[0] == "small: 6 cells, 6 there already"
    assert json.loads((out / "small.json").read_text())["rows"] == table["rows"]

    found = check_cell("rounds_scratch", 1, out, cache=cache)
    assert found.digest_equal
    assert found.loss == found.loss_recorded


def test_a_stopped_study_keeps_what_is_finished(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    run = StudyRun(STUDY, tmp_path, "the command", lambda line: None, 1, tmp_path / "cache")
    headline = run.run(stop)
    assert len(headline.missing) == 6
    with pytest.raises(SettingsError, match="no cell of study small is finished"):
        write_tables(STUDY, tmp_path)
    assert not (tmp_path / "small.json").exists()
    with pytest.raises(SettingsError, match="no finished cell"):
        check_cell("rounds_scratch", 0, tmp_path)


def test_results_are_not_taken_for_what_they_are_not(tmp_path: Path) -> None:
    """Another study's name, cells of others, cells that were edited, two that make the same."""
    out, cache = tmp_path / "out", tmp_path / "cache"
    run = StudyRun(STUDY, out, "the command", lambda line: None, 1, cache)
    run.run(threading.Event())
    table, other = (out / "small.json").read_text(), STUDY.model_copy(update={"title": "Other"})
    with pytest.raises(SettingsError, match="another study of that name"):
        StudyRun(other, out, "the command", lambda line: None, 1, cache).run(threading.Event())
    with pytest.raises(SettingsError, match="another study of that name"):
        write_tables(other, out)
    with (
        Store(out / "cells").held("small"),
        pytest.raises(SettingsError, match="another `diloco study run`"),
    ):
        run.run(threading.Event())
    cells = out / "cells" / "small"
    shutil.copy(cells / "dp_scratch-0.json", cells / "dp_scratch-7.json")
    with pytest.raises(SettingsError, match="is the cell of small/dp_scratch seed 0"):
        check_cell("dp_scratch", 7, out, cache=cache)
    (cells / "dp_scratch-7.json").unlink()
    edited = cells / "again_scratch-0.json"
    document = json.loads(edited.read_text())
    document["result"]["loss"] = 0.5
    edited.write_text(json.dumps(document))
    headline, damaged = write_tables(STUDY, out)
    assert headline.rows["again_scratch"].seeds == (1,)
    assert headline.rows["again_scratch"].loss_std is None
    assert "again_scratch-0.json is no finished cell: it is not what was written" in damaged[0]
    assert json.loads(table)["rows"]["dp_scratch"]["loss_std"] > 0


def test_cells_that_cannot_be_made_are_named_and_the_others_are_made(tmp_path: Path) -> None:
    """One of them refuses its recipe, the other takes its worker process with it."""
    dead_and_cut = [
        {"learner": 1, "kind": "death", "at": {"step": 2}},
        {"learner": 1, "kind": "partition", "at": {"step": 4}, "until": {"step": 9}},
    ]
    rows = [
        {"name": "cut", "world": {"befalls": dead_and_cut}, "seeds": [0]},
        {"name": "ends", "spec": {"program": {"factory": "tests.harness.factory:ending"}}},
        {"name": "good"},
    ]
    study = Study.model_validate(STUDY.model_dump() | {"rows": rows, "versus": {}})
    lines: list[str] = []
    run = StudyRun(study, tmp_path, "the command", lines.append, 1, tmp_path / "cache")
    with pytest.raises(DilocoError) as raised:
        run.run(threading.Event())
    said = str(raised.value)
    assert "cut_scratch seed 0: world.befalls: something is to befall island-01" in said
    for seed in (0, 1):
        assert f"ends_scratch seed {seed}: its worker process has ended (exit code 7)" in said
    table = json.loads((tmp_path / "small.json").read_text())
    assert table["rows"]["good_scratch"]["seeds"] == [0, 1]
    assert len(table["missing"]) == 3


def _check(**found: Any) -> Check:
    as_recorded = Check("small", "a", 0, True, 2.0, 2.0, "here", "here", 1.0)
    return replace(as_recorded, **found)


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ({}, None),
        ({"digest_equal": False}, "weights differ"),
        ({"loss": 2.0000001}, "their loss is another"),
        ({"isa": "elsewhere", "digest_equal": False, "loss": 2.019}, None),
        ({"isa": "elsewhere", "digest_equal": False, "loss": 1.981}, None),
        ({"isa": "elsewhere", "digest_equal": False, "loss": 2.021}, "more than 1%"),
        ({"isa": "elsewhere", "digest_equal": False, "loss": math.nan}, "more than 1%"),
        ({"loss": math.nan, "loss_recorded": math.nan}, None),
    ],
)
def test_what_is_not_as_recorded_is_a_fault(found: dict[str, Any], fault: str | None) -> None:
    said = _check(**found).fault
    assert said is None if fault is None else said is not None and fault in said
