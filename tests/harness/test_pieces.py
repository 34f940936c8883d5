"""The small parts: output directory, TOML, names and paces, programs, environment, words."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragments.errors import DilocoError, RunDirectoryError, SettingsError
from fragments.runspec import RunSpec
from harness.environment import child_environment, use_few_threads, use_server_arithmetic
from harness.nearest import nearest
from harness.outdir import prepare
from harness.pace import slope
from harness.plan import make_islands
from harness.presets import PRESETS
from harness.toml import to_toml
from harness.words import bytes_text, count_text, duration_text, rate_text, sparkline


def test_an_earlier_run_is_put_aside_and_nothing_else_is_touched(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    assert prepare(out) is None
    (out / "summary.json").write_text("first")
    assert prepare(out) == tmp_path / "demo.previous"
    assert (tmp_path / "demo.previous" / "summary.json").read_text() == "first"
    assert prepare(out) == tmp_path / "demo.previous"
    assert not (tmp_path / "demo.previous" / "summary.json").exists()

    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter.txt").write_text("dear")
    with pytest.raises(RunDirectoryError, match="is no earlier local run"):
        prepare(foreign)
    assert (foreign / "chapter.txt").read_text() == "dear"
    (foreign / "chapter.txt").rename(tmp_path / "file")
    assert prepare(foreign) is None
    with pytest.raises(RunDirectoryError):
        prepare(tmp_path / "file")


_scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("ab .é\"'"), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.text("abc_-é. \n", max_size=6), _values, max_size=4))
def test_toml_is_read_back_as_it_was(table: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml({"t": table})) == {"t": table}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_survives_the_file_that_init_reads(name: str) -> None:
    spec = PRESETS[name].spec
    text = to_toml({"init": spec.model_dump(mode="json", exclude_unset=True)})
    assert RunSpec.model_validate(tomllib.loads(text)["init"]) == spec


def test_islands_have_different_names_and_the_last_is_slow() -> None:
    three = make_islands(3, 0.2, 3.0)
    assert [island.pace_s for island in three] == pytest.approx([0.2, 0.2, 0.6])
    assert three[-1].name == "asia-slow"
    assert len({island.name for island in make_islands(16, 0.2, 2.0)}) == 16
    assert [island.pace_s for island in make_islands(2, 0.0, 1.0)] == [0.0, 0.0]
    with pytest.raises(SettingsError, match="needs a pace"):
        make_islands(2, 0.0, 2.0)


def test_the_rate_is_that_of_the_line_through_the_points() -> None:
    points = [(t / 10, int(t / 10 / 0.22)) for t in range(100)]
    assert slope(points) == pytest.approx(1 / 0.22, rel=0.01)
    with pytest.raises(DilocoError, match="too few looks"):
        slope([(1.0, 3.0), (1.0, 4.0)])


def test_the_environment_of_processes() -> None:
    environ = {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2 --other=1"}
    use_server_arithmetic(environ)
    assert environ["JAX_PLATFORMS"] == "cpu"
    flags = environ["XLA_FLAGS"].split()
    assert flags.count("--xla_cpu_max_isa=SSE4_2") == 1
    assert not any(flag.endswith("=AVX") for flag in flags)
    assert environ["OMP_NUM_THREADS"] == "1"
    before = dict(environ)
    use_few_threads(environ)
    assert environ == before


SERVERS = """
import os
from harness.environment import use_server_arithmetic
use_server_arithmetic(os.environ)
import jax, numpy as np
draw = np.random.default_rng(0)
x, y, z = (draw.normal(size=100_000).astype(np.float32) for _ in range(3))
made = np.asarray(jax.jit(lambda x, y, z: x + y * z)(x, y, z))
print(int((made != x + y * z).sum()))
"""


@pytest.mark.parametrize("flags", ["", "--xla_cpu_enable_fast_math=false not_a_flag"])
def test_a_server_rounds_every_product(flags: str) -> None:
    environ = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", SERVERS], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0"]


def test_settings_of_the_parent_are_not_settings_of_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DILOCO_BUDGET_TOKENS", "3")
    assert not [name for name in child_environment() if name.startswith("DILOCO_")]


def test_words() -> None:
    assert [count_text(n) for n in (0, 950, 1234, 1_234_567, 2.5e9)] == [
        "0", "950", "1.23k", "1.23M", "2.5G",
    ]  # fmt: skip
    assert [bytes_text(n) for n in (12, 1_234_567)] == ["12 B", "1.23 MB"]
    assert [rate_text(*m) for m in ((9.83, 10), (0.04, 0.0), (212.4, 250.0))] == [
        "9.8 of 10", "0.0", "212 of 250",
    ]  # fmt: skip
    assert [duration_text(s) for s in (7, 75, 3700)] == ["0:07", "1:15", "1:01:40"]
    assert sparkline([1, 2, 3], 2) == "▁█"
    assert sparkline([], 5) == ""
    assert sparkline([2.0, 2.0], 5) == "▁▁"


def test_the_nearest_word() -> None:
    words = ["outer.learning_rate", "outer.momentum", "budget_tokens"]
    assert nearest("outer.lerning_rate", words) == "outer.learning_rate"
    assert nearest("learning-rate", words) == "outer.learning_rate"
    assert nearest("xyzzy", words) is None
    verbs = ["admin stop", "admin set", "study run", "status"]
    assert nearest("admin foo", verbs) is None
    assert nearest("admin stp", verbs) == "admin stop"
    assert nearest("admn stop", verbs) == "admin stop"
    assert nearest("outer.foo", ["outer.name", "outer.momentum"]) is None
    # What all have in common makes nothing near.
    flags = ["--address", "--data", "--name"]
    assert nearest("--nome", flags) == "--name"
    assert nearest("--date", flags) == "--data"
    assert nearest("--rate", flags) is None
    assert nearest("DILOCO_OUT", ["DILOCO_CONFIG", "DILOCO_NAME"]) is None
