"""Runs one cell of a study from its recipe."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from fragments.errors import SettingsError
from fragments.runspec import RunSpec
from learner.program import Params, Program
from simulation.baselines import alone, checkpoint, data_parallel
from simulation.result import RunResult
from simulation.run import simulate
from simulation.study.matrix import Recipe

LoadProgram = Callable[[RunSpec, str | None], Program]

WARM_CURSOR = 1 << 20
"""Batches of a warm-up begin here: in another pass over the data than any run reaches, so that a
run does not see again, in the same order, what its checkpoint was trained on.
"""


def run_recipe(
    recipe: Recipe,
    load_program: LoadProgram,
    cache: Path,
    made_by: str = "",
    on_progress: Callable[[float], None] = lambda share: None,
) -> RunResult:
    """The run of a recipe; the same recipe gives the same bits on the same kind of processor.

    Args:
        load_program: makes the program of a run's settings and data.
        cache: directory of warm checkpoints; made if need be.
        made_by: the code and the processor, as far as they shape the bits: a checkpoint that
            others have made is none of this run's.
        on_progress: told the share of the tokens trained, a few times a run.

    Raises:
        SettingsError, DataError: when the recipe does not fit the program or its data.
        StalledError: when the run cannot end.
    """
    spec, world = recipe.run_spec, recipe.run_world
    program = load_program(spec, recipe.data)
    params = _start(recipe, load_program, program, cache, made_by)
    match recipe.kind:
        case "rounds":
            return simulate(
                spec,
                world,
                program,
                params,
                late_against=recipe.late_against,
                on_progress=on_progress,
            )
        case "pushes":
            return simulate(
                spec,
                world,
                program,
                params,
                applied_alone=recipe.pushed,
                policy="pushes",
                on_progress=on_progress,
            )
        case "data_parallel":
            return data_parallel(
                program, params, world, spec.budget_tokens, spec.seed, on_progress=on_progress
            )
        case "alone":
            tokens = spec.budget_tokens // world.learners
            return alone(program, params, world, tokens, spec.seed, on_progress=on_progress)


def _start(
    recipe: Recipe, load_program: LoadProgram, program: Program, cache: Path, made_by: str
) -> Params:
    """Version 0: fresh parameters, or the warm checkpoint of this seed."""
    warm = recipe.warm
    params = program.init_params(recipe.seed)
    if warm is None:
        return params
    key = {
        "warm": recipe.completed["warm"],
        "tokens": warm.tokens,
        "learners": warm.learners,
        "seed": recipe.seed,
        "data": recipe.data,
        "made_by": made_by,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache / f"warm-{digest[:24]}.safetensors"
    of_warm = load_program(RunSpec.model_validate({**warm.spec, "seed": recipe.seed}), recipe.data)
    if _shapes(of_warm.init_params(recipe.seed)) != _shapes(params):
        raise SettingsError(
            "the checkpoint that warm rows begin from is of a model of another shape: give"
            " [warm.spec.program.settings] what the row has, or begin from scratch"
        )
    if not path.exists():
        trained = checkpoint(of_warm, params, warm.learners, warm.tokens, WARM_CURSOR)
        _save(trained, path)
    return _load(params, path)


def _shapes(params: Params) -> list[tuple[str, tuple[int, ...]]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [(jax.tree_util.keystr(where), np.shape(leaf)) for where, leaf in leaves]


def _save(params: Params, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    tensors = {jax.tree_util.keystr(where): np.asarray(leaf) for where, leaf in leaves}
    part = path.with_suffix(f".{os.getpid()}.part")
    save_file(tensors, part)
    part.replace(path)


def _load(params: Params, path: Path) -> Params:
    tensors = load_file(path)

    def leaf(where: tuple[object, ...], value: jax.Array) -> jax.Array:
        return jax.numpy.asarray(tensors[jax.tree_util.keystr(where)], value.dtype)

    return jax.tree_util.tree_map_with_path(leaf, params)
