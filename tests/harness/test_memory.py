"""A process is trimmed when it has grown, and not for less."""

from __future__ import annotations

import numpy as np
import pytest

from harness.environment import child_environment
from harness.memory import (
    GROWTH_LEAST_BYTES,
    GROWTH_SHARE,
    Trimmer,
    mapped_bytes,
    resident_bytes,
)


class Process:
    """Memory that a trim takes back to `needed_bytes`."""

    def __init__(self, needed_bytes: int) -> None:
        self.needed_bytes = self.now_bytes = needed_bytes
        self.trims = 0
        self.trimmer = Trimmer(lambda: self.now_bytes, self.trim)

    def trim(self) -> None:
        self.trims += 1
        self.now_bytes = self.needed_bytes

    def grow(self, by_bytes: int) -> int:
        self.now_bytes += by_bytes
        self.trimmer.look()
        return self.trims


@pytest.mark.parametrize("needed_bytes", [1 << 20, 1 << 33])
def test_a_process_is_trimmed_for_what_it_has_grown(needed_bytes: int) -> None:
    process = Process(needed_bytes)
    allowed_bytes = max(GROWTH_LEAST_BYTES, needed_bytes // GROWTH_SHARE)
    assert process.grow(allowed_bytes) == 0
    assert process.grow(allowed_bytes) == 1
    assert process.grow(allowed_bytes) == 1
    assert process.grow(allowed_bytes) == 2


def test_what_is_needed_is_not_trimmed_for_again_and_again() -> None:
    process = Process(1 << 30)
    process.needed_bytes = 3 << 30
    assert process.grow(2 << 30) == 1
    assert process.grow(0) == 1


def test_growth_counts_from_the_least_since() -> None:
    process = Process(1 << 30)
    assert process.grow(-(1 << 29)) == 0
    assert process.grow(GROWTH_LEAST_BYTES) == 0
    assert process.grow(GROWTH_LEAST_BYTES) == 1


def test_small_things_are_mapped_on_their_own_only_with_large_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert mapped_bytes({}) == mapped_bytes({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == 8 << 20
    own = "glibc.malloc.check=1:glibc.malloc.hugetlb=1"
    assert mapped_bytes({"GLIBC_TUNABLES": own}) == 2 << 20
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert mapped_bytes(child_environment()) == 2 << 20


def test_resident_memory_is_that_of_this_process() -> None:
    before_bytes = resident_bytes()
    held = np.ones(1 << 26, np.uint8)
    grown_bytes = resident_bytes() - before_bytes
    assert held.nbytes // 2 < grown_bytes < 2 * held.nbytes
