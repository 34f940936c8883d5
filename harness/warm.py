"""Compiles what the processes of a local run need, once, into a cache that they all read.

Compiling costs a process several seconds of a core; learners and evaluator of one run would each
compile the same, all at once, and a learner that was killed would do so again. Runs as a process
of its own (`python -m harness.warm JSON`) beside the server's start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import MutableMapping
from pathlib import Path

from fragments.runspec import RunSpec


def request(spec: RunSpec, data: str | None) -> str:
    """The argument of the process."""
    return json.dumps({"spec": spec.model_dump(mode="json"), "data": data})


def asked_of(request: str) -> tuple[RunSpec, str | None]:
    """The inverse of `request`."""
    asked = json.loads(request)
    return RunSpec.model_validate(asked["spec"]), asked["data"]


def use_cache(environ: MutableMapping[str, str], directory: Path) -> None:
    """Has jax keep compiled programs in `directory` and take them from there.

    The directory belongs to one run: compiled code fits the machine that it was compiled on.
    """
    environ["JAX_COMPILATION_CACHE_DIR"] = str(directory.absolute())
    environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def compile_all(spec: RunSpec, data: str | None) -> None:
    """Runs everything that a learner or an evaluator runs, once."""
    import jax.numpy as jnp

    from harness.programs import load_program
    from learner.island import Island
    from learner.member import layout_of
    from learner.program import Shard

    program = load_program(spec, data)
    params = program.init_params(spec.seed)
    inner = program.init_inner(params)
    batch = program.batch(Shard(0, 1), 0)
    program.step(params, inner, batch, jnp.float32(0)).loss.block_until_ready()
    program.evaluate(params)
    Island("warm-up", layout_of(program, params, spec), spec.codec, params, cursor=0).warm_up()


if __name__ == "__main__":
    compile_all(*asked_of(sys.argv[1]))
