"""The layout: balanced, deterministic, the same on both sides, and refused when damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fragments.layout
from fragments.errors import LayoutError
from fragments.layout import FLOAT_DTYPES, Layout, TensorSpec, build_layout
from fragments.quantize import valid_counts

SPECS = (
    TensorSpec(".embed", (10, 7), "float32", averaged=True),
    TensorSpec(".layers[0].weight", (7, 7), "bfloat16"),
    TensorSpec(".layers[1].weight", (7, 7), "float16"),
    TensorSpec(".scale", (), "float32", averaged=True),
    TensorSpec(".empty", (0, 7), "float32"),
)

shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)


tensors = st.lists(
    st.tuples(shapes, st.sampled_from(FLOAT_DTYPES), st.booleans()), min_size=1, max_size=20
)
Tensors = list[tuple[tuple[int, ...], str, bool]]


def specs_of(drawn: Tensors) -> list[TensorSpec]:
    # Not in the strategy: the runtime type checker draws random numbers, which those must not.
    return [TensorSpec(f"['t{i}']", *parts) for i, parts in enumerate(drawn)]


@given(tensors, st.integers(1, 20), st.integers(1, 40))
def test_every_value_has_one_place(drawn: Tensors, wanted: int, block: int) -> None:
    specs = specs_of(drawn)
    layout = build_layout(specs, min(wanted, len(specs)), block, "model")
    placed = [slot.spec for fragment in layout.fragments for slot in fragment.slots]
    assert sorted(placed, key=lambda spec: spec.path) == list(layout.tensors)
    assert layout.num_values == sum(spec.size for spec in specs)
    for fragment in layout.fragments:
        row = 0
        for slot in fragment.slots:
            assert slot.row_start == row
            row = slot.row_stop
            assert 0 <= (slot.row_stop - slot.row_start) * block - slot.size < block
        assert row == fragment.num_rows <= layout.rows_padded
        assert fragment.slots
        counts = valid_counts(fragment, layout.rows_padded)
        assert counts.shape == (layout.rows_padded,)
        for slot in fragment.slots:
            assert counts[slot.row_start : slot.row_stop].sum() == slot.size
        assert counts.max() <= block
        assert counts[fragment.num_rows :].sum() == 0


@given(tensors, st.integers(1, 20))
def test_weights_differ_by_at_most_one_tensor(drawn: Tensors, wanted: int) -> None:
    specs = specs_of(drawn)
    layout = build_layout(specs, min(wanted, len(specs)), 8, "model")
    weights = [fragment.num_values for fragment in layout.fragments]
    assert max(weights) <= min(weights) + max(spec.size for spec in specs)


@given(tensors, st.randoms(use_true_random=False), st.integers(1, 20))
def test_order_of_specs_does_not_matter(drawn: Tensors, random: Any, wanted: int) -> None:
    specs = specs_of(drawn)
    shuffled = list(specs)
    random.shuffle(shuffled)
    num_fragments = min(wanted, len(specs))
    there = build_layout(shuffled, num_fragments, 8, "model")
    assert build_layout(specs, num_fragments, 8, "model") == there
    assert build_layout(specs, num_fragments, 8, "model").digest == there.digest


@given(tensors, st.integers(1, 20), st.text())
def test_json_gives_the_same_layout(drawn: Tensors, wanted: int, identity: str) -> None:
    specs = specs_of(drawn)
    layout = build_layout(specs, min(wanted, len(specs)), 8, identity)
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.digest == layout.digest


def test_the_digest_covers_all_that_must_agree() -> None:
    def digest(
        specs: tuple[TensorSpec, ...] = SPECS,
        fragments: int = 2,
        block: int = 8,
        identity: str = "a",
    ) -> str:
        return build_layout(specs, fragments, block, identity).digest

    others = [
        digest(fragments=3),
        digest(block=16),
        digest(identity="b"),
        digest(SPECS[1:]),
        digest((replace(SPECS[0], path=".embedding"), *SPECS[1:])),
        digest((replace(SPECS[0], shape=(7, 10)), *SPECS[1:])),
        digest((replace(SPECS[0], dtype="bfloat16"), *SPECS[1:])),
        digest((replace(SPECS[0], averaged=False), *SPECS[1:])),
    ]
    assert len({digest(), *others}) == len(others) + 1


def test_a_known_layout() -> None:
    """Golden: what two processes of different versions must agree on."""
    layout = build_layout(SPECS, 2, 16, "golden")
    assert [[slot.spec.path for slot in f.slots] for f in layout.fragments] == [
        [".embed", ".empty", ".scale"],
        [".layers[0].weight", ".layers[1].weight"],
    ]
    assert [(f.num_rows, f.num_values) for f in layout.fragments] == [(6, 71), (8, 98)]
    assert layout.rows_padded == 8
    assert layout.digest == "d7df9dd4d310e181ea70ab1b7108ded411fb175375f9d0ba779ee1e344f9a53a"


def test_a_model_of_empty_tensors_still_has_a_row() -> None:
    layout = build_layout([TensorSpec("a", (0,), "float32")], 1, 4, "")
    assert (layout.rows_padded, layout.fragments[0].num_rows, layout.num_values) == (1, 0, 0)


@pytest.mark.parametrize(
    ("specs", "fragments", "block", "message"),
    [
        ([], 1, 8, "no floating-point tensor"),
        ([SPECS[0], SPECS[0]], 1, 8, r"\.embed"),
        ([TensorSpec(".count", (), "int32")], 1, 8, r"\.count has dtype int32"),
        ([TensorSpec(".x", (), "float64")], 1, 8, r"\.x has dtype float64"),
        ([TensorSpec(".x", (-1,), "float32")], 1, 8, r"\.x has the impossible shape"),
        ([TensorSpec(".x", (1 << 30, 1 << 30), "float32")], 1, 8, r"\.x has the impossible shape"),
        (SPECS, 6, 8, "5 tensors over 6 fragments"),
        (SPECS, 0, 8, "over 0 fragments"),
        (SPECS, 1, 0, "block is 0"),
        (SPECS, 1, 1 << 30, "block is"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(
    specs: list[TensorSpec], fragments: int, block: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        build_layout(specs, fragments, block, "model")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.data(), json_values)
def test_a_damaged_layout_is_refused_or_whole(data: st.DataObject, odd: object) -> None:
    record = json.loads(build_layout(SPECS, 2, 8, "model").to_json())
    holder: Any = data.draw(st.sampled_from([record, *record["tensors"]]))
    key = data.draw(st.sampled_from([*sorted(holder), "unknown"]))
    if data.draw(st.booleans()):
        holder[key] = odd
    else:
        holder.pop(key, None)
    text = json.dumps(record)
    try:
        layout = Layout.from_json(text)
    except LayoutError:
        return
    record["tensors"].sort(key=lambda entry: entry["path"])
    assert json.loads(layout.to_json()) == record


@given(st.text() | st.just("[" * 100_000) | st.just("9" * 5000))
def test_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(text)


def test_layout_payload_and_chunks_import_no_jax() -> None:
    code = (
        "import sys, fragments.layout, fragments.payload, fragments.chunks;"
        "sys.exit('jax' in sys.modules)"
    )
    root = Path(fragments.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode == 0
