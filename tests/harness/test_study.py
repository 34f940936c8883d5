"""A study on real worker processes."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fragments.errors import SettingsError
from harness.study import Made, StudyRun
from harness.study_check import Check, check_cell
from harness.study_tables import write_tables
from simulation.study.matrix import Study, plan
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


def test_a_stopped_study_says_so_and_of_no_cells_there_is_no_table(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    run = StudyRun(STUDY, tmp_path, "the command", lambda line: None, 1, tmp_path / "cache")
    assert run.run(stop) == Made(None, (), is_stopped=True)
    with pytest.raises(SettingsError, match="no finished cell of the study small"):
        write_tables(STUDY, tmp_path)
    assert not list(tmp_path.glob("small*"))
    with pytest.raises(SettingsError, match="no finished cell"):
        check_cell("rounds_scratch", 0, tmp_path)


def test_cells_that_cannot_be_made_are_named_and_the_others_are_made(tmp_path: Path) -> None:
    """One refuses its recipe, one its checkpoint, others end with or without their process."""
    dead_and_cut = [
        {"learner": 1, "kind": "death", "at": {"step": 2}},
        {"learner": 1, "kind": "partition", "at": {"step": 4}, "until": {"step": 9}},
    ]
    wide = {"program": {"factory": "tests.harness.factory:sized", "settings": {"width": 4}}}
    rows = [
        {"name": "cut", "world": {"befalls": dead_and_cut}},
        {"name": "wide", "starts": ["warm"], "spec": wide},
        {"name": "ends", "spec": {"program": {"factory": "tests.harness.factory:ending"}}},
        {"name": "huge", "spec": {"program": {"factory": "tests.harness.factory:greedy"}}},
        {"name": "killed", "spec": {"program": {"factory": "tests.harness.factory:killed"}}},
        {"name": "good"},
    ]
    changes = {"rows": rows, "versus": {}, "seeds": [0], "warm": {"tokens": 64, "learners": 2}}
    study = Study.model_validate(STUDY.model_dump() | changes)
    lines: list[str] = []
    run = StudyRun(study, tmp_path, "the command", lines.append, 1, tmp_path / "cache")
    made = run.run(threading.Event())
    assert [line.split(" could not")[0] for line in made.faults] == [
        "cut_scratch seed 0", "wide seed 0", "ends_scratch seed 0", "huge_scratch seed 0",
        "killed_scratch seed 0",
    ]  # fmt: skip
    said = "\n".join(made.faults)
    assert len(said.splitlines()) == 5
    assert "world.befalls: something is to befall island-01" in said
    assert "the checkpoint that warm rows begin from is of a model of another shape" in said
    assert "its worker process has ended (exit code 7)" in said
    assert "huge_scratch seed 0 could not be made: out of memory" in said
    assert "killed by signal 9, which is how the kernel ends a process when" in said
    assert lines[-1].startswith("[6/6] good_scratch seed 0: ")
    assert not made.is_stopped
    table = json.loads((tmp_path / "small.json").read_text())
    assert list(table["rows"]) == ["good_scratch"]
    assert table["rows"]["good_scratch"]["loss_std"] is None
    assert len(table["missing"]) == 5


ONE = Study.model_validate(
    STUDY.model_dump() | {"rows": [{"name": "dp", "kind": "data_parallel"}], "versus": {}}
)


def test_a_damaged_cell_is_named_and_left_and_the_table_is_of_the_others(tmp_path: Path) -> None:
    def run() -> Made:
        cache = tmp_path / "cache"
        return StudyRun(ONE, tmp_path, "it", lambda line: None, 1, cache).run(threading.Event())

    run()
    cell = tmp_path / "cells" / "small" / "dp_scratch-1.json"
    edited = cell.read_text().replace('"loss": ', '"loss": 1')
    cell.write_text(edited)
    for faults, tables in ((run().faults, None), ((), write_tables(ONE, tmp_path))):
        told = faults if tables is None else tables.damaged
        assert len(told) == 1
        assert "dp_scratch-1.json is no finished cell: it is not what was written" in told[0]
        assert "remove it to have it made again" in told[0]
    assert json.loads((tmp_path / "small.json").read_text())["missing"] == ["dp_scratch seed 1"]
    assert cell.read_text() == edited
    with pytest.raises(SettingsError, match="not what was written"):
        check_cell("dp_scratch", 1, tmp_path)
    cell.unlink()
    assert run().faults == ()


def test_another_studys_results_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text('{"title": "Other"}', encoding="utf-8")
    run = StudyRun(ONE, tmp_path, "it", lambda line: None, 1, tmp_path / "cache")
    for act in (lambda: run.run(threading.Event()), lambda: write_tables(ONE, tmp_path)):
        with pytest.raises(
            SettingsError, match=r"is the table of another study of that name \('Other'\)"
        ):
            act()
    (tmp_path / "small.json").write_text("[]", encoding="utf-8")
    with pytest.raises(SettingsError, match="is no table of a study"):
        write_tables(ONE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["small.json"]
    with pytest.raises(SettingsError, match="is no directory"):
        write_tables(ONE, tmp_path / "small.json")


def test_one_study_is_run_by_one_process_at_a_time(tmp_path: Path) -> None:
    store, stop = Store(tmp_path / "cells"), threading.Event()
    stop.set()
    run = StudyRun(ONE, tmp_path, "it", lambda line: None, 1, tmp_path / "cache")
    with (
        store.held("small"),
        pytest.raises(SettingsError, match="another `diloco study run` makes cells in"),
    ):
        run.run(stop)
    assert run.run(stop).is_stopped


_PARENT = """
import sys
from pathlib import Path
from harness.study_process import Worker
from simulation.study.matrix import Recipe
worker = Worker(Path(sys.argv[1]))
print(worker.pid, flush=True)
worker.run(Recipe.model_validate_json(sys.argv[2]))
"""


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """Whatever it is at: here a batch that never comes."""
    told = tmp_path / "told"
    os.mkfifo(told)
    spec = {"program": {"factory": "tests.harness.factory:stuck", "settings": {"told": str(told)}}}
    study = Study.model_validate(ONE.model_dump() | {"rows": [{"name": "a", "spec": spec}]})
    recipe = plan(study)[0].recipes[0]
    parent = subprocess.Popen(
        [
            sys.executable, "-c",
            _PARENT,
            str(tmp_path), recipe.model_dump_json(),
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        try:
            told.read_text()
            assert not select.select([worker], [], [], 0)[0]
            parent.kill()
            assert select.select([worker], [], [], 30)[0], "the worker outlives its parent"
        finally:
            os.close(worker)


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
