"""Which tensor is in which fragment, and where its values lie. Imports neither jax nor numpy.

A *fragment value* is one float32 array of shape (rows_padded, block). Each tensor of the
fragment occupies whole rows [row_start, row_stop) in row-major order; the tail of its last row,
and all rows from `num_rows` on, are padding and zero. So a block never crosses tensors, norms per
tensor come from whole rows, and all fragments of a run share one shape, for which jitted
functions compile once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fragments.errors import LayoutError

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of parameters that can be averaged; on the server all of them are float32."""

DEFAULT_BLOCK = 4096
"""Values per quantizer block, which is one row of a fragment value."""

MAX_BLOCK = 1 << 17
MAX_TENSOR_VALUES = 1 << 40
"""Bounds on what a layout may ask for, so that a damaged one is refused before it allocates."""

_JSON_VERSION = 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One floating-point tensor of the model.

    `averaged`: merged by the token-weighted average (embeddings, single values) rather than by
    direction.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    averaged: bool = False

    @property
    def size(self) -> int:
        """Number of values; 1 for a scalar, 0 where a dimension is 0."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Rows [row_start, row_stop) of its fragment hold the `size` values of `spec`."""

    spec: TensorSpec
    row_start: int
    row_stop: int
    size: int


@dataclass(frozen=True, slots=True)
class FragmentLayout:
    """The tensors of one fragment, by path. `num_rows` and `num_values` leave padding out."""

    index: int
    block: int
    slots: tuple[TensorSlot, ...]
    num_rows: int
    num_values: int


@dataclass(frozen=True)
class Layout:
    """Every tensor of a run and its place. Equal on both sides, or they do not talk.

    `tensors` are sorted by path, `rows_padded` (at least 1) is the largest `num_rows` of all
    fragments, `identity` names model and tokenizer. Make one with `build_layout` or `from_json`.
    """

    block: int
    tensors: tuple[TensorSpec, ...]
    fragments: tuple[FragmentLayout, ...]
    rows_padded: int
    identity: str

    @property
    def num_values(self) -> int:
        """Values in the model, padding left out."""
        return sum(fragment.num_values for fragment in self.fragments)

    @cached_property
    def digest(self) -> str:
        """Sha256 (64 hex digits) over everything that both sides must agree on."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The canonical text: the same layout gives the same bytes."""
        fragment_of = {
            slot.spec.path: fragment.index for fragment in self.fragments for slot in fragment.slots
        }
        record = {
            "version": _JSON_VERSION,
            "block": self.block,
            "identity": self.identity,
            "tensors": [
                {
                    "path": spec.path,
                    "shape": list(spec.shape),
                    "dtype": spec.dtype,
                    "averaged": spec.averaged,
                    "fragment": fragment_of[spec.path],
                }
                for spec in self.tensors
            ],
        }
        return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @staticmethod
    def from_json(text: str) -> Layout:
        """The layout that `to_json` wrote; LayoutError for anything else.

        The assignment is taken as it stands, so a run outlives a change of the balancing rule.
        """
        return _from_record(text)


def build_layout(
    specs: Sequence[TensorSpec], num_fragments: int, block: int, identity: str
) -> Layout:
    """Spreads the tensors over `num_fragments` fragments: largest first into the lightest.

    Equal sizes go by path, equal weights to the fragment with fewer tensors, then to the lower
    index, so the result depends on nothing but the set of specs. The heaviest fragment holds at
    most the lightest plus one tensor.

    Raises LayoutError for an empty tree, a path twice, a dtype that is not in FLOAT_DTYPES, a
    block out of range, or more fragments than tensors.
    """
    _check_specs(specs)
    if not 1 <= num_fragments <= len(specs):
        raise LayoutError(
            f"cannot spread {len(specs)} tensors over {num_fragments} fragments: set the number of"
            f" fragments to between 1 and {len(specs)}"
        )
    weights = [0] * num_fragments
    counts = [0] * num_fragments
    fragment_of: dict[str, int] = {}
    for spec in sorted(specs, key=lambda spec: (-spec.size, spec.path)):
        lightest = min(range(num_fragments), key=lambda p: (weights[p], counts[p], p))
        fragment_of[spec.path] = lightest
        weights[lightest] += spec.size
        counts[lightest] += 1
    return _assemble(specs, fragment_of, block, identity)


def _assemble(
    specs: Sequence[TensorSpec], fragment_of: Mapping[str, int], block: int, identity: str
) -> Layout:
    """Lays the rows out, given the fragment of each path; specs are already checked."""
    if not 1 <= block <= MAX_BLOCK:
        raise LayoutError(f"block is {block}; it must be between 1 and {MAX_BLOCK} values")
    tensors = tuple(sorted(specs, key=lambda spec: spec.path))
    members: list[list[TensorSpec]] = [[] for _ in range(max(fragment_of.values()) + 1)]
    for spec in tensors:
        members[fragment_of[spec.path]].append(spec)
    fragments = tuple(_lay_rows(p, block, group) for p, group in enumerate(members))
    rows_padded = max([1, *(fragment.num_rows for fragment in fragments)])
    return Layout(block, tensors, fragments, rows_padded, identity)


def _lay_rows(index: int, block: int, group: Sequence[TensorSpec]) -> FragmentLayout:
    if not group:
        raise LayoutError(f"fragment {index} holds no tensor; every fragment must hold one")
    slots: list[TensorSlot] = []
    row = 0
    for spec in group:
        row_stop = row + -(-spec.size // block)
        slots.append(TensorSlot(spec, row, row_stop, spec.size))
        row = row_stop
    return FragmentLayout(index, block, tuple(slots), row, sum(spec.size for spec in group))


def _check_specs(specs: Sequence[TensorSpec]) -> None:
    if not specs:
        raise LayoutError("the parameter tree holds no floating-point tensor to synchronise")
    seen: set[str] = set()
    for spec in specs:
        if spec.path in seen:
            raise LayoutError(f"two tensors have the path {spec.path}; paths must be unique")
        seen.add(spec.path)
        if spec.dtype not in FLOAT_DTYPES:
            raise LayoutError(
                f"{spec.path} has dtype {spec.dtype}; only {', '.join(FLOAT_DTYPES)} can be"
                " synchronised: declare it local, or cast it"
            )
        if any(length < 0 for length in spec.shape) or spec.size > MAX_TENSOR_VALUES:
            raise LayoutError(f"{spec.path} has the impossible shape {spec.shape}")


def _from_record(text: str) -> Layout:
    try:
        record = json.loads(text)
    # RecursionError: nesting of thousands of brackets, which no layout has.
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"the layout is not JSON: {error}") from error
    _check_keys(record, {"version", "block", "identity", "tensors"}, "the layout")
    if record["version"] != _JSON_VERSION:
        raise LayoutError(
            f"the layout has version {record['version']!r}; this program reads {_JSON_VERSION}"
        )
    block, identity, entries = record["block"], record["identity"], record["tensors"]
    if type(block) is not int or not isinstance(identity, str) or not isinstance(entries, list):
        raise LayoutError("the layout's block, identity or tensors have the wrong type")
    fragment_of: dict[str, int] = {}
    specs: list[TensorSpec] = []
    for position, entry in enumerate(entries):
        spec, fragment = _tensor_from_entry(position, entry, len(entries))
        specs.append(spec)
        fragment_of[spec.path] = fragment
    _check_specs(specs)
    return _assemble(specs, fragment_of, block, identity)


def _tensor_from_entry(position: int, entry: object, num_tensors: int) -> tuple[TensorSpec, int]:
    where = f"tensor {position} of the layout"
    _check_keys(entry, {"path", "shape", "dtype", "averaged", "fragment"}, where)
    assert isinstance(entry, dict)  # _check_keys has refused anything else
    path, shape, dtype, averaged, fragment = (
        entry[key] for key in ("path", "shape", "dtype", "averaged", "fragment")
    )
    # `type(x) is int` because True is an int to isinstance.
    if not isinstance(shape, list) or any(type(length) is not int for length in shape):
        raise LayoutError(f"{where} has a shape that is not a list of integers")
    if not isinstance(path, str) or not isinstance(dtype, str) or not isinstance(averaged, bool):
        raise LayoutError(f"{where} has a path, dtype or averaged flag of the wrong type")
    if type(fragment) is not int or not 0 <= fragment < num_tensors:
        raise LayoutError(f"{where} is in fragment {fragment!r}, which cannot be")
    return TensorSpec(path, tuple(shape), dtype, averaged), fragment


def _check_keys(record: object, keys: set[str], where: str) -> None:
    if not isinstance(record, dict):
        raise LayoutError(f"{where} is not a JSON object")
    if set(record) != keys:
        odd = sorted(set(record) ^ keys)
        raise LayoutError(f"{where} has missing or unknown keys: {', '.join(odd)}")
