"""What a learner holds, as immutable values that pass between its threads.

Shape letters: B rows (blocks), N values per row.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float32

from fragments.records import Adopted, Version
from learner.program import Inner, Params, Shard

WHOLE = Shard(0, 1)
"""All of the data: before the server has said which part."""


@dataclass(frozen=True, slots=True)
class Base:
    """The value of one fragment that this learner last adopted, and when.

    `value_BxN`: float32 (rows_padded, block), the broadcast copy to the bit.
    `step`, `tokens`, `cursor`: the learner's own counters at adoption.
    """

    version: Version
    value_BxN: Float32[Array, "B N"]
    digest: str
    step: int
    tokens: int
    cursor: int


@dataclass(frozen=True, slots=True)
class Completed:
    """The learner after a completed step: parameters and the bases they grew from.

    `step`, `tokens`: trained since this process began, or since the first of those did from whose
    checkpoints it goes on; `cursor`: next batch of `shard`.
    """

    step: int
    tokens: int
    cursor: int
    params: Params
    bases: tuple[Base | None, ...]
    shard: Shard = WHOLE


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a learner goes on from when its process has ended: a completed step, and the inner
    optimizer's state after that step.
    """

    completed: Completed
    inner: Inner


@dataclass(frozen=True, slots=True)
class Answered:
    """The local value that the last answer for a fragment was made from, its base, and when.

    Of use for as long as that very base is held: the same version begun anew is another `Base`, and
    local progress on it is no longer what the answer was made from.
    """

    base: Base
    local_BxN: Float32[Array, "B N"]
    at: Completed


@dataclass(frozen=True, slots=True)
class Prepared:
    """A new value of one fragment, on the device and checked, ready to adopt."""

    fragment: int
    version: Version
    value_BxN: Float32[Array, "B N"]
    digest: str


@dataclass(frozen=True, slots=True)
class Adoption:
    """The learner after adopting, and what to tell the server."""

    completed: Completed
    adopted: tuple[Adopted, ...]
