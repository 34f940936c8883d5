from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fragments.errors import SettingsError
from fragments.runspec import RunSpec
from fragments.sealed import seal, unseal
from learner.program import Program
from simulation.result import RunResult
from simulation.study.cell import run_recipe
from simulation.study.matrix import Recipe, Study, load_study, plan
from simulation.study.plot import draw_bits
from simulation.study.store import Cell, DamagedCellError, Store
from simulation.study.table import markdown, summarise
from tests.support.tiny import TinyProgram

ROWS = [{"name": "a"}, {"name": "dp", "kind": "data_parallel"}, {"name": "one", "kind": "alone"}]


def _study(**settings: Any) -> Study:
    document = {
        "name": "small",
        "title": "Small",
        "seeds": [0, 1],
        "starts": ["scratch"],
        "spec": {"budget_tokens": 960, "fragments": 2, "sync_interval": 4, "codec": {"block": 8}},
        "world": {"speeds": [1, 1]},
        "rows": ROWS,
    }
    return Study.model_validate(document | settings)


def _load(spec: RunSpec, data: str | None) -> Program:
    del spec, data
    return TinyProgram(learning_rate=0.02)


def _result(loss: float, **changes: Any) -> RunResult:
    base: dict[str, Any] = {
        "policy": "decoupled", "loss": loss, "loss_unit": "bits", "tokens_trained": 100,
        "tokens_pushed": 90, "tokens_merged": 80, "merged_share": 0.8, "rounds_merged": 10,
        "rounds_abandoned": 0, "virtual_s": 5.0, "finished_s": 6.0, "goodput": 1.0,
        "bytes_up": 1000, "bytes_down": 2000, "bits_up": 3.0, "bits_down": 3.5, "digest": "d",
        "curve": [], "learners": [],
    }  # fmt: skip
    return RunResult.model_validate(base | changes)


def _cell(row: str, recipe: Recipe, loss: float) -> Cell:
    return Cell(
        study="small", row=row, seed=recipe.seed, recipe=recipe, recipe_digest=recipe.digest,
        result=_result(loss), commit="c", command="run", isa="x", wall_s=1.0,
    )  # fmt: skip


def test_rows_are_laid_over_the_study_and_varied() -> None:
    vary = {"spec.outer.learning_rate": [0.3, 0.7], "spec.merge": ["rda", "average"]}
    rows = plan(_study(rows=[{"name": "r", "spec": {"outer": {"momentum": 0.5}}, "vary": vary}]))
    assert [row.name for row in rows] == [
        "r-learning_rate_0.3-merge_rda_scratch",
        "r-learning_rate_0.3-merge_average_scratch",
        "r-learning_rate_0.7-merge_rda_scratch",
        "r-learning_rate_0.7-merge_average_scratch",
    ]
    spec = rows[3].recipes[1].run_spec
    assert (spec.outer.learning_rate, spec.outer.momentum, spec.merge) == (0.7, 0.5, "average")
    assert (spec.seed, spec.budget_tokens) == (1, 960)


def test_a_varied_table_names_the_row_by_its_own_keys() -> None:
    outer = [{"learning_rate": 0.7, "momentum": 0.5}]
    rows = plan(_study(rows=[{"name": "r", "vary": {"spec.outer": outer}}]))
    assert [row.name for row in rows] == ["r-learning_rate_0.7-momentum_0.5_scratch"]


def test_warm_rows_have_the_plain_name_and_their_own_references() -> None:
    versus = {"dp": "dp"}
    warm = {"tokens": 64, "learners": 2}
    rows = plan(_study(starts=["warm", "scratch"], warm=warm, versus=versus))
    assert [row.name for row in rows][:2] == ["a", "a_scratch"]
    assert rows[0].versus == {"dp": "dp"}
    assert rows[1].versus == {"dp": "dp_scratch"}
    assert rows[0].recipes[0].digest != rows[1].recipes[0].digest


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"spec": {"quorums": 3}}, "quorums: no such setting"),
        ({"world": {"speeds": [1, -1]}}, "speeds"),
        ({"starts": ["warm"]}, r"no \[warm\]"),
        ({"versus": {"dp": "nobody"}}, "nobody"),
        ({"rows": [{"name": "a"}, {"name": "a"}]}, "two rows named a_scratch"),
        ({"spec": {"seed": 3}}, "spec.seed is the study's"),
        ({"seeds": [1, 1]}, "a seed is there twice"),
        ({"rows": [{"name": "a", "pushed": "server"}]}, 'pushed is for kind = "pushes"'),
        ({"rows": [{"name": "a", "kind": "alone", "late_against": "base"}]}, "late_against is for"),
        ({"spec": {"outer": {"learning_rate": math.nan}}}, "outer.learning_rate: nan is no number"),
        ({"world": {"speeds": [1, 1], "links": {"-1": {}}}}, "no learner -1"),
        ({"rows": [{"name": "a", "vary": {"spec.seed": [1]}}]}, "row a-seed_1_scratch: spec.seed"),
        (
            {"starts": ["warm"], "warm": {"tokens": 64, "spec": {"quorum": -1}}},
            r"row a: warm\.spec\.quorum: ",
        ),
        ({"starts": ["warm"], "warm": {"tokens": 64, "spec": {"seed": 1}}}, r"a: warm\.spec\.seed"),
        (
            {"world": {"speeds": [1, 1], "links": {"2": {}}}},
            "row a_scratch: world: links: there is",
        ),
        (
            {
                "world": {
                    "befalls": [
                        {"learner": 0, "kind": "death", "at": {"step": 9}, "until": {"step": 4}}
                    ]
                }
            },
            "is not after at",
        ),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        plan(_study(**change))


@pytest.mark.parametrize(
    ("vary", "sentence"),
    [
        ({"spec": [1]}, "row a: vary: spec takes tables, not 1"),
        ({"spec.outer": [{}], "spec.outer.momentum": [0.1]}, "spec.outer.momentum is inside spec"),
        ({"spec.outer.momentum": [0.1], "spec.outer": [{}]}, "spec.outer.momentum is inside spec"),
        ({"outer.momentum": [0.1]}, "row a: vary: outer.momentum is not under spec or world"),
        ({"spec.outer..momentum": [0.1]}, "no such setting"),
    ],
)
def test_keys_to_vary_do_not_replace_one_another(vary: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        plan(_study(rows=[{"name": "a", "vary": vary}]))


@pytest.mark.parametrize("seeds", ["[1, 1]", "[1.0]", "[true]", '["1"]'])
def test_seeds_are_whole_numbers_and_no_one_is_there_twice(tmp_path: Path, seeds: str) -> None:
    path = tmp_path / "s.toml"
    for own, key in ((seeds, "seeds"), ("[0]", r"row a\w*: seeds")):
        text = f'name = "s"\ntitle = "S"\nseeds = {own}\n[[rows]]\nname = "a"\nseeds = {seeds}\n'
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SettingsError, match=key) as raised:
            load_study(path)
        assert "at least 1 item" not in str(raised.value)  # What only follows from it is not told.


def test_a_file_that_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        load_study(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = 'x'\ntitle = 'x'\nseed = [0]\nrows = []\n")
    with pytest.raises(SettingsError, match="seed: no such setting"):
        load_study(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    "wrong",
    [
        'base = ""',
        'vary = { "spec" = [1, 2] }',
        'vary = { "spec.outer" = [1], "spec.outer.momentum" = [0.1] }',
        'vary = { "spec.merge" = [] }',
        f'vary = {{ "spec.outer.learning_rate" = [1{"0" * 90}] }}',
        "seeds = []",
        "seeds = [9999999999999999]",
        "world.step_s = inf",
    ],
)
def test_wrong_kinds_of_value_are_told_in_a_sentence(tmp_path: Path, wrong: str) -> None:
    above, below = (wrong, "") if wrong.startswith("base") else ("", wrong)
    path = tmp_path / "s.toml"
    path.write_text(
        f'{above}\nname = "s"\ntitle = "S"\nseeds = [0]\nstarts = ["scratch"]\n'
        f'spec.budget_tokens = 960\nworld.speeds = [1]\n[[rows]]\nname = "a"\n{below}\n',
        encoding="utf-8",
    )
    with pytest.raises(SettingsError, match=r"s\.toml|learning_rate|row a"):
        load_study(path)


def test_a_study_is_laid_over_its_base(tmp_path: Path) -> None:
    common = 'name = "base"\ntitle = "Base"\nseeds = [0]\nspec = { quorum = 2, fragments = 3 }\n'
    (tmp_path / "base.toml").write_text(
        common + '[[rows]]\nname = "a"\n[[rows]]\nname = "b"\n[world]\nspeeds = [1, 1]\n'
    )
    (tmp_path / "more.toml").write_text(
        'base = "base.toml"\nname = "more"\ntitle = "More"\nspec.quorum = 1\n'
        '[[rows]]\nname = "b"\nspec.fragments = 4\n[[rows]]\nname = "c"\n'
    )
    study = load_study(tmp_path / "more.toml")
    assert (study.name, study.seeds) == ("more", (0,))
    given = [(row.name, row.recipes[0].spec) for row in plan(study)]
    assert given == [
        ("a_scratch", {"quorum": 1, "fragments": 3}),
        ("b_scratch", {"quorum": 1, "fragments": 4}),
        ("c_scratch", {"quorum": 1, "fragments": 3}),
    ]


def test_a_base_that_is_built_on_its_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "b.toml"\n')
    (tmp_path / "b.toml").write_text('base = "a.toml"\n')
    with pytest.raises(SettingsError, match="is built on it"):
        load_study(tmp_path / "a.toml")


def test_the_studies_of_this_repository_can_be_planned() -> None:
    files = sorted((Path(__file__).parents[2] / "studies").glob("*.toml"))
    assert files
    for file in files:
        assert plan(load_study(file))


@pytest.mark.parametrize("kind", ["rounds", "pushes", "data_parallel", "alone"])
def test_a_recipe_gives_the_same_bits_again(kind: str, tmp_path: Path) -> None:
    row = {"name": "a", "kind": kind}
    study = _study(rows=[row], starts=["warm"], warm={"tokens": 64, "learners": 2})
    recipe = plan(study)[0].recipes[0]
    first = run_recipe(recipe, _load, tmp_path / "one")
    again = run_recipe(recipe, _load, tmp_path / "one")
    elsewhere = run_recipe(recipe, _load, tmp_path / "two")
    assert first == again == elsewhere
    assert len(list((tmp_path / "one").iterdir())) == 1


def test_a_checkpoint_of_other_code_or_another_processor_is_made_again(tmp_path: Path) -> None:
    study = _study(rows=[{"name": "a"}], starts=["warm"], warm={"tokens": 64, "learners": 2})
    recipe = plan(study)[0].recipes[0]
    for who, checkpoints in (("one", 1), ("one", 1), ("other", 2)):
        run_recipe(recipe, _load, tmp_path, who)
        assert len(list(tmp_path.iterdir())) == checkpoints


def test_a_cell_does_not_count_once_a_default_of_its_recipe_has_changed(tmp_path: Path) -> None:
    store, recipe = Store(tmp_path), plan(_study())[0].recipes[0]
    assert recipe.completed["spec"]["staleness_bound"] == 4
    cell = _cell("a_scratch", recipe, 2.5)

    def counts(**spec: Any) -> bool:
        now = recipe.completed
        then = {**now, "spec": {**now["spec"], **spec}}
        store.write(cell.model_copy(update={"completed": then}))
        found = store.finished("small", "a_scratch", recipe) is not None
        assert found == bool(store.by_recipe())
        return found

    assert counts()
    assert not counts(staleness_bound=3)
    assert not counts(gone_since=1)
    # What is new since then, or older than the record, says nothing against it.
    assert cell.model_copy(update={"completed": {"spec": {"quorum": 1}}}).is_current
    assert cell.is_current


def test_finished_cells_are_kept_and_others_recipes_do_not_count(tmp_path: Path) -> None:
    store, recipe = Store(tmp_path), plan(_study())[0].recipes[0]
    assert store.finished("small", "a_scratch", recipe) is None
    cell = _cell("a_scratch", recipe, 2.5)
    store.write(cell)
    assert store.finished("small", "a_scratch", recipe) == cell
    assert store.find("a_scratch", 0) == cell
    changed = plan(_study(world={"speeds": [1, 0.5]}))[0].recipes[0]
    assert store.finished("small", "a_scratch", changed) is None
    with pytest.raises(SettingsError, match="no finished cell of row a_scratch and seed 7"):
        store.find("a_scratch", 7)


def _edit(path: Path, sealed: bool, **changes: Any) -> None:
    document = unseal(path.read_bytes()) | changes
    path.write_bytes(seal(document) if sealed else json.dumps(document).encode())


def test_a_cell_that_is_anothers_or_edited_is_refused_by_name(tmp_path: Path) -> None:
    store, recipes = Store(tmp_path), plan(_study())[0].recipes
    first, second = (_cell("a", recipe, 2.5) for recipe in recipes)
    path = store.write(first)
    store.write(second)

    def refused(sentence: str, seed: int = 0) -> None:
        place = store.path("small", "a", seed)
        with pytest.raises(DamagedCellError, match=sentence) as raised:
            store.find("a", seed)
        assert str(raised.value).startswith(str(place))
        assert str(raised.value).endswith("remove it to have it made again")
        assert place.name not in {f"a-{cell.seed}.json" for cell in store.by_recipe().values()}

    store.path("small", "a", 7).write_bytes(path.read_bytes())
    refused("is the cell of small/a seed 0", seed=7)
    _edit(path, sealed=False)
    refused("it has no checksum")
    store.write(first)
    path.write_text(path.read_text().replace("2.5", "2.4"))
    refused("it is not what was written")
    store.write(first)
    _edit(path, sealed=True, recipe=second.recipe.model_dump(mode="json"))
    refused("is the cell of small/a seed 0")
    store.write(first)
    other = first.recipe.model_copy(update={"world": {"speeds": [1, 0.5]}})
    _edit(path, sealed=True, recipe=other.model_dump(mode="json"))
    refused("has another recipe than it says")
    path.write_bytes(b"\xff{")
    refused("it is no JSON")
    store.write(first)
    assert store.find("a", 0) == first


@pytest.mark.parametrize(("row", "seed"), [("../small/a", 0), ("a/b", 0), ("", 0), ("a", -1)])
def test_what_is_no_name_of_a_cell_is_not_looked_for(tmp_path: Path, row: str, seed: int) -> None:
    with pytest.raises(SettingsError, match="names no cell"):
        Store(tmp_path).find(row, seed)


def test_the_cells_of_this_repository_are_as_they_were_written() -> None:
    directory = Path(__file__).parents[2] / "docs" / "results" / "cells"
    store = Store(directory)
    for path in directory.glob("*/*.json"):
        row, _, seed = path.stem.rpartition("-")
        assert store.read(path.parent.name, row, int(seed)) is not None


def test_the_study_that_is_meant_is_the_one_named_or_the_headline(tmp_path: Path) -> None:
    store = Store(tmp_path)
    recipe, longer = plan(_study())[0].recipes[0], plan(_study(world={"jitter": 0.5}))[0].recipes[0]
    store.write(_cell("a", recipe, 2.5))
    store.write(_cell("a", recipe, 2.5).model_copy(update={"study": "twin"}))
    assert store.find("a", 0).recipe_digest == recipe.digest
    store.write(_cell("a", longer, 2.0).model_copy(update={"study": "longer"}))
    with pytest.raises(SettingsError, match=r"several studies \(longer, small, twin\)"):
        store.find("a", 0)
    assert store.find("a", 0, "longer").result.loss == 2.0
    with pytest.raises(SettingsError, match="no study no_such is under"):
        store.find("a", 0, "no_such")
    with pytest.raises(SettingsError, match=r"row a and seed 1 under .*longer"):
        store.find("a", 1, "longer")
    store.write(_cell("a", longer, 1.5).model_copy(update={"study": "headline"}))
    assert store.find("a", 0).result.loss == 1.5


def test_a_damaged_cell_of_another_study_does_not_hide_the_headlines(tmp_path: Path) -> None:
    store, recipe = Store(tmp_path), plan(_study())[0].recipes[0]
    store.write(_cell("a", recipe, 2.0).model_copy(update={"study": "headline"}))
    store.path("early", "a", 0).parent.mkdir()
    store.path("early", "a", 0).write_text("{", encoding="utf-8")
    assert store.find("a", 0).study == "headline"
    with pytest.raises(SettingsError, match="early"):
        store.find("a", 0, "early")


def test_the_cell_of_the_documented_example_is_found_in_the_results_of_this_repository() -> None:
    results = Path(__file__).parents[2] / "docs" / "results"
    assert Store(results / "cells").find("decoupled_equal", 0).study == "headline"


def test_a_run_is_found_by_its_recipe_whatever_its_row_is_called(tmp_path: Path) -> None:
    store, recipe = Store(tmp_path), plan(_study())[0].recipes[1]
    cell = _cell("another_name", recipe, 2.5)
    store.write(cell)
    assert store.by_recipe() == {recipe.digest: cell}


def test_a_damaged_cell_of_another_study_is_passed_over(tmp_path: Path) -> None:
    store, recipe = Store(tmp_path), plan(_study())[0].recipes[0]
    store.write(_cell("a", recipe, 2.0))
    store.path("other", "b", 0).parent.mkdir()
    store.path("other", "b", 0).write_text("{", encoding="utf-8")
    assert list(store.by_recipe()) == [recipe.digest]
    with pytest.raises(SettingsError, match="no finished cell"):
        store.read("other", "b", 0)


def test_where_no_cell_can_be_kept_none_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cells cannot be kept in"):
        Store(tmp_path / "file").prepare("small")


def test_a_diverged_run_survives_its_file(tmp_path: Path) -> None:
    store, recipe = Store(tmp_path), plan(_study())[0].recipes[0]
    store.write(_cell("a_scratch", recipe, math.nan))
    found = store.find("a_scratch", 0)
    assert math.isnan(found.result.loss)


def test_the_table_is_paired_by_seed() -> None:
    versus = {"dp": "dp", "alone": "one", "equal": "a"}
    study = _study(versus=versus)
    rows = plan(study)
    losses = {"a_scratch": (2.02, 3.09), "dp_scratch": (2.0, 3.0), "one_scratch": (2.2, 3.3)}
    cells = {
        row.name: {r.seed: _cell(row.name, r, losses[row.name][r.seed]) for r in row.recipes}
        for row in rows
    }
    table = summarise(study, rows, cells)
    own = table.rows["a_scratch"]
    # 1% and 3%: mean 2, s = sqrt(2), half-width 12.706 * sqrt(2) / sqrt(2).
    assert own.gap_to_dp_percent == pytest.approx(2.0)
    assert own.gap_to_dp_interval == pytest.approx(12.706)
    # (2.2 - 2.02) / .2 = .9 and (3.3 - 3.09) / .3 = .7.
    assert own.share_of_dp_gain == pytest.approx(0.8)
    assert own.gap_to_equal_percent == 0.0
    assert own.gap_to_sync_percent is None
    assert own.loss_std == pytest.approx((3.09 - 2.02) / math.sqrt(2))
    assert table.missing == ()
    text = markdown(table)
    assert "| `a_scratch` | 2 | 2.5550 ± 0.7566 | +2.00 ± 12.71 | 0.800 ± 1.271 |" in text


def test_a_single_seed_has_no_spread_and_a_diverged_run_no_number(tmp_path: Path) -> None:
    study = _study(seeds=[0], versus={"dp": "dp"})
    rows, losses = plan(study), {"a_scratch": math.nan, "dp_scratch": 2.0, "one_scratch": 2.2}
    cells = {
        row.name: {0: _cell(row.name, row.recipes[0], losses[row.name]).model_copy()}
        for row in rows
    }
    table = summarise(study, rows, cells)
    said = json.loads(table.model_dump_json())["rows"]
    assert said["one_scratch"]["loss_std"] is None
    assert said["a_scratch"]["loss_mean"] is None
    assert said["a_scratch"]["gap_to_dp_percent"] is None
    lines = markdown(table).splitlines()
    assert next(line for line in lines if "`dp_scratch` |" in line).startswith(
        "| `dp_scratch` | 1 | 2.0000 | +0.00 | - |"
    )
    assert any("| diverged | diverged |" in line for line in lines)


def test_data_parallel_has_a_time_only_where_its_gradients_take_some() -> None:
    for link, is_timed in (({"upload_steps": 0.3}, False), ({"up_mbit_s": 1.0}, True)):
        rows = plan(_study(world={"speeds": [1, 1], "link": link}))
        cells = {row.name: {0: _cell(row.name, row.recipes[0], 2.0)} for row in rows}
        table = summarise(_study(), rows, cells)
        dp, rounds = table.rows["dp_scratch"], table.rows["a_scratch"]
        assert (rounds.goodput, rounds.virtual_s) == (1.0, 5.0)
        assert (dp.goodput, dp.virtual_s) == ((1.0, 5.0) if is_timed else (None, None))
        line = next(line for line in markdown(table).splitlines() if "`dp_scratch`" in line)
        assert ("| 100.0 | 80.0 | 0.000 | 5 |" in line) == is_timed
        assert ("| - | 80.0 | 0.000 | - |" in line) != is_timed


def test_bits_are_drawn_for_the_runs_that_have_rounds(tmp_path: Path) -> None:
    study = _study(versus={"equal": "a"})
    rows = plan(study)
    cells = {row.name: {0: _cell(row.name, row.recipes[0], 2.0)} for row in rows}
    assert draw_bits(summarise(study, rows, cells), tmp_path / "bits.png")
    assert (tmp_path / "bits.png").stat().st_size > 1000
    assert not draw_bits(summarise(_study(), plan(_study()), cells), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_what_is_not_made_yet_is_named() -> None:
    study = _study()
    rows = plan(study)
    recipe = rows[0].recipes[1]
    table = summarise(study, rows, {"a_scratch": {1: _cell("a_scratch", recipe, 2.0)}})
    assert table.rows["a_scratch"].seeds == (1,)
    assert "a_scratch seed 0" in table.missing
    assert len(table.missing) == 5
