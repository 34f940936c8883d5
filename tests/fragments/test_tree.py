"""Trees of parameters to fragment values and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragments.errors import LayoutError
from fragments.layout import TensorSpec, build_layout
from fragments.tree import TreeCodec, pack_fragment, tensor_specs, unpack_fragment


class Norm(NamedTuple):
    scale: jax.Array
    shift: jax.Array


def model() -> dict[str, Any]:
    """Ordinary inputs: a scalar, an empty and a one-element tensor, three dtypes, a local leaf."""
    rng = np.random.default_rng(0)

    def normal(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return {
        "embed": normal((11, 5)),
        "layers": [
            {"w": normal((5, 5), jnp.bfloat16), "b": jnp.ones((5,))},
            {"w": normal((5, 5), jnp.float16), "b": jnp.zeros((1,))},
        ],
        "norm": Norm(jnp.float32(3), jnp.zeros((0, 4))),
        "count": jnp.int32(7),
        "nothing": None,
    }


LOCAL = (r"\['count'\]",)


def codec_of(tree: Any, fragments: int = 3, block: int = 8) -> TreeCodec:
    layout = build_layout(tensor_specs(tree, local=LOCAL), fragments, block, "test")
    return TreeCodec(layout, tree, LOCAL)


def assert_same(there: Any, here: Any) -> None:
    def same(a: jax.Array, b: jax.Array) -> None:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)

    jax.tree.map(same, there, here)


def test_specs_name_every_tensor_with_shape_dtype_and_merge() -> None:
    specs = tensor_specs(model(), averaged=("embed",), local=LOCAL)
    assert [(s.path, s.shape, s.dtype, s.averaged) for s in specs] == [
        ("['embed']", (11, 5), "float32", True),
        ("['layers'][0]['b']", (5,), "float32", False),
        ("['layers'][0]['w']", (5, 5), "bfloat16", False),
        ("['layers'][1]['b']", (1,), "float32", True),
        ("['layers'][1]['w']", (5, 5), "float16", False),
        ("['norm'].scale", (), "float32", True),
        ("['norm'].shift", (0, 4), "float32", True),
    ]


def test_shapes_alone_are_enough_for_specs_and_predicates_may_choose() -> None:
    shapes = jax.eval_shape(model)
    by_name = tensor_specs(shapes, averaged="embed", local=LOCAL)
    by_call = tensor_specs(shapes, lambda path: "embed" in path, lambda path: "count" in path)
    assert by_name == by_call == tensor_specs(model(), ["embed"], LOCAL)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jnp.int32(1), r"\['x'\] has dtype int32.*declare it local"),
        (jax.random.key(0), r"\['x'\] has dtype key"),
        (jnp.bool_(True), r"\['x'\] has dtype bool"),
        (np.float64(1), r"\['x'\] has dtype float64.*cast it"),
        (np.complex64(1), r"\['x'\] has dtype complex64"),
        (1.5, r"\['x'\] is a float, not an array"),
        (jax.nn.relu, r"\['x'\] is a .*, not an array"),
    ],
)
def test_a_leaf_that_cannot_be_averaged_is_refused_with_its_path(leaf: Any, message: str) -> None:
    tree = {"w": jnp.ones(3), "x": leaf}
    with pytest.raises(LayoutError, match=message):
        tensor_specs(tree)
    assert [spec.path for spec in tensor_specs(tree, local="x")] == ["['w']"]


@pytest.mark.parametrize("fragments", [1, 3, 7])
@pytest.mark.parametrize("block", [1, 8, 4096])
def test_a_tree_survives_the_round_trip_to_the_bit(fragments: int, block: int) -> None:
    tree = model()
    codec = codec_of(tree, fragments, block)
    rebuilt = jax.tree.map(jnp.zeros_like, tree) | {"count": tree["count"]}
    for p, fragment in enumerate(codec.layout.fragments):
        blocks = codec.pack(p, tree)
        assert blocks.shape == (codec.layout.rows_padded, block)
        assert blocks.dtype == jnp.float32
        assert np.count_nonzero(blocks) <= fragment.num_values
        rebuilt = codec.replace(p, rebuilt, blocks)
    assert_same(rebuilt, tree)


@settings(max_examples=15)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 20),
)
def test_any_shapes_survive_the_round_trip(
    shapes: list[tuple[int, ...]], fragments: int, block: int
) -> None:
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    codec = codec_of(leaves, min(fragments, len(leaves)), block)
    tree = [jnp.zeros_like(leaf) for leaf in leaves]
    for p in range(len(codec.layout.fragments)):
        tree = codec.replace(p, tree, codec.pack(p, leaves))
    assert_same(tree, leaves)


def test_padding_is_zero_and_each_tensor_has_its_own_rows() -> None:
    layout = build_layout(tensor_specs([jnp.ones((3,)), jnp.ones((6,))]), 1, 4, "")
    blocks = pack_fragment(layout, 0, [jnp.full((3,), 2.0), jnp.full((6,), 3.0)])
    np.testing.assert_array_equal(blocks, [[2, 2, 2, 0], [3, 3, 3, 3], [3, 3, 0, 0]])


def test_replacing_leaves_all_other_leaves_alone() -> None:
    tree = model()
    codec = codec_of(tree)
    replaced = codec.replace(0, tree, codec.pack(0, tree) + jnp.float32(1))
    kept = {id(leaf) for leaf in jax.tree.leaves(tree)} & {
        id(leaf) for leaf in jax.tree.leaves(replaced)
    }
    assert len(kept) == len(jax.tree.leaves(tree)) - len(codec.layout.fragments[0].slots)


def test_packing_works_inside_jit() -> None:
    tree = model()
    codec = codec_of(tree)
    leaves = unpack_fragment(codec.layout, 0, codec.pack(0, tree))

    @jax.jit
    def doubled(leaves: list[jax.Array]) -> list[jax.Array]:
        return unpack_fragment(codec.layout, 0, pack_fragment(codec.layout, 0, leaves) * 2)

    assert_same(doubled(leaves), [leaf * jnp.asarray(2, leaf.dtype) for leaf in leaves])


def test_after_warm_up_nothing_compiles(compilations: list[str]) -> None:
    params = model()
    codec = codec_of(params, 3, 16)
    before = len(compilations)
    codec.warm_up(params)
    warm = len(compilations)
    assert warm > before
    for p in range(3):
        params = codec.replace(p, params, codec.pack(p, params))
    assert len(compilations) == warm


def test_an_equinox_model_is_a_tree_like_any_other() -> None:
    mlp = eqx.filter(eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(1)), eqx.is_inexact_array)
    codec = codec_of(mlp, 2)
    assert codec.layout.tensors[0].path == ".layers[0].bias"
    rebuilt = mlp
    for p in range(2):
        rebuilt = codec.replace(p, rebuilt, codec.pack(p, mlp))
    assert_same(rebuilt, mlp)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed": None}, r"the layout has \['embed'\], which this model lacks"),
        ({"extra": jnp.ones(2)}, r"this model has \['extra'\], which the layout lacks"),
        ({"embed": jnp.ones((5, 11))}, r"\['embed'\] is float32\[5, 11\].*float32\[11, 5\]"),
        ({"embed": jnp.ones((11, 5), jnp.bfloat16)}, r"\['embed'\] is bfloat16"),
    ],
)
def test_another_model_is_refused_with_the_path(change: dict[str, Any], message: str) -> None:
    layout = codec_of(model()).layout
    with pytest.raises(LayoutError, match=message):
        TreeCodec(layout, model() | change, LOCAL)


def test_a_tree_of_another_structure_is_refused() -> None:
    codec = codec_of(model())
    with pytest.raises(LayoutError, match="structure changed"):
        codec.pack(0, model() | {"more": jnp.ones(1)})


def test_leaves_and_blocks_that_do_not_fit_are_refused() -> None:
    layout = build_layout(tensor_specs([jnp.ones((3,))]), 1, 4, "")
    with pytest.raises(LayoutError, match=r"\[0\] has shape \(4,\)"):
        pack_fragment(layout, 0, [jnp.ones((4,))])
    with pytest.raises(LayoutError, match="2 leaves were given"):
        pack_fragment(layout, 0, [jnp.ones((3,)), jnp.ones((3,))])
    with pytest.raises(LayoutError, match=r"shape \(2, 4\)"):
        unpack_fragment(layout, 0, jnp.ones((2, 4)))


def test_replaced_leaves_are_views_of_the_value_and_outlive_it() -> None:
    """On a processor, where a learner's base and the tensors that it trains from are one memory."""
    specs = [TensorSpec("['a']", (3, 50), "float32"), TensorSpec("['b']", (70,), "float32")]
    layout = build_layout(specs, 1, 64, "views")
    tree = {"a": jnp.zeros((3, 50)), "b": jnp.zeros(70)}
    codec = TreeCodec(layout, tree)
    expected = {"a": jnp.arange(150.0).reshape(3, 50), "b": -jnp.arange(70.0)}
    value_BxN = codec.pack(0, expected)
    value_BxN.block_until_ready()
    begin, size = value_BxN.unsafe_buffer_pointer(), value_BxN.nbytes
    replaced = codec.replace(0, tree, value_BxN)
    assert all(
        begin <= leaf.unsafe_buffer_pointer() < begin + size for leaf in jax.tree.leaves(replaced)
    )
    del value_BxN
    for name, leaf in replaced.items():
        np.testing.assert_array_equal(leaf, expected[name])
    assert jax.jit(lambda tree: tree["a"].sum())(replaced) == expected["a"].sum()


def test_replaced_leaves_of_a_narrower_dtype_are_their_own() -> None:
    layout = build_layout([TensorSpec("['a']", (64,), "bfloat16")], 1, 64, "narrow")
    tree = {"a": jnp.zeros(64, jnp.bfloat16)}
    (leaf,) = jax.tree.leaves(TreeCodec(layout, tree).replace(0, tree, jnp.ones((1, 64))))
    assert leaf.dtype == jnp.bfloat16
    np.testing.assert_array_equal(leaf.astype(jnp.float32), np.ones(64, np.float32))
