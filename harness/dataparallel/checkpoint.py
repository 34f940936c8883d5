"""Checkpoints of a data-parallel job: one file, written by process 0, read by all when they start.

All processes hold the same parameters and optimizer state, so one copy is the whole job's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from fragments.disk import REAL_DISK, write_atomically
from fragments.errors import CheckpointError

_NUMBER = "number"


def save(path: Path, number: int, state: Any) -> None:
    """The state after `number` steps, in place of the one before; whole or not at all."""
    import jax

    leaves = {str(index): np.asarray(leaf) for index, leaf in enumerate(jax.tree.leaves(state))}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = safetensors.numpy.save(leaves, metadata={_NUMBER: str(number)})
    write_atomically(REAL_DISK, path, content)


def saved_number(path: Path) -> int:
    """The number of steps of the checkpoint; 0 where there is none.

    Raises:
        CheckpointError: for one that cannot be read.
    """
    if not path.exists():
        return 0
    try:
        with safe_open(path, framework="numpy") as stored:
            return int(stored.metadata()[_NUMBER])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint of this job: {error}") from error


def load(path: Path, like: Any) -> tuple[int, Any]:
    """The number of steps and the state of the checkpoint; 0 and `like` where there is none.

    Raises:
        CheckpointError: for one that cannot be read, or that is of another program.
    """
    if not path.exists():
        return 0, like
    import jax

    leaves, tree = jax.tree.flatten(like)
    try:
        with safe_open(path, framework="numpy") as stored:
            number = int(stored.metadata()[_NUMBER])
            found = [stored.get_tensor(str(index)) for index in range(len(leaves))]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint of this job: {error}") from error
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(leaves, found, strict=True)):
        raise CheckpointError(f"{path} is a checkpoint of another program")
    return number, jax.tree.unflatten(tree, [jax.numpy.asarray(one) for one in found])
