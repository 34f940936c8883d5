"""A factory that a user names: what is built, and what is said of one that builds nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from cli.main import main
from fragments.errors import SettingsError
from fragments.runspec import RunSpec
from harness.programs import load_program
from learner.program import Program, Shard
from outer_server.store.rundir import read_run

README = Path(__file__).parents[2] / "README.md"

WRONG = {
    "no_function": ("pass", r"has no build\(\).*it must be build\(settings: dict"),
    "misspelt": ("def biuld(settings, data, seed): pass", r"did you mean biuld\?"),
    "few_arguments": ("def build(settings): pass", r"is build\(settings\); it must be build\("),
    "named_only": ("def build(*, settings, data, seed): pass", "it must be build"),
    "raises": (
        "def build(settings, data, seed):\n    return settings['width']",
        r"raised KeyError: 'width' \(.*raises.py:2\)",
    ),
    "imports_nothing": ("import no_such_thing", "importing imports_nothing raised ModuleNotFound"),
    "no_python": ("def build(:", "importing no_python raised SyntaxError"),
    "returns_none": (
        "def build(settings, data, seed): pass",
        r"returned None, which is no program: it lacks identity, tokens_per_step, .*step\(\)",
    ),
    "returns_half": (
        """
class Half:
    identity, step = "half", 3
def build(settings, data, seed):
    return Half()""",
        r"returned a Half, .* lacks tokens_per_step, .*step\(\), evaluate\(\)",
    ),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory that factories are found in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return tmp_path


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ({"factory": "no_such_module:build"}, "there is no module no_such_module"),
        ({"factory": "harness.toml:nothing"}, r"harness.toml has no nothing\(\)"),
        ({"settings": {"widht": 3}}, r"widht: no such setting: did you mean width\?"),
        ({"settings": {"width": "x"}}, "program.settings width: Input should be a valid integer"),
    ],
)
def test_a_program_that_cannot_be_built_says_why(program: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load_program(RunSpec.model_validate({"program": program}), None)


@pytest.mark.parametrize("name", WRONG)
def test_a_factory_of_ones_own_that_is_wrong_says_how(name: str, here: Path) -> None:
    source, sentence = WRONG[name]
    (here / f"{name}.py").write_text(source + "\n")
    with pytest.raises(SettingsError, match=sentence) as told:
        load_program(RunSpec.model_validate({"program": {"factory": f"{name}:build"}}), None)
    assert f"program.factory {name}:build" in str(told.value)


def test_the_readme_s_model_of_ones_own_is_born_and_learns(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = README.read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(# mymodel\.py.*?)```", text, re.DOTALL)
    (here / "mymodel.py").write_text(source)
    own = ["--program.factory", "mymodel:build", "--program.settings", "width=6"]
    small = ["--fragments", "1", "--budget-tokens", "3200"]
    assert main(["init", "run", *own, *small]) == 0, capsys.readouterr().err
    spec, layout = read_run(here / "run")
    assert layout.num_values == 6
    program = load_program(spec, None)
    assert isinstance(program, Program)
    params = program.init_params(spec.seed)
    inner = program.init_inner(params)
    before = program.evaluate(params)
    for cursor in range(50):
        batch = program.batch(Shard(0, 1), cursor)
        params, inner, _ = program.step(params, inner, batch, jnp.float32(0.0))
    assert program.evaluate(params) < 0.1 * before
