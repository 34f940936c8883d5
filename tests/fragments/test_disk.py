"""A file holds what was written where, whichever way its pages took."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from fragments import disk
from fragments.disk import RealDisk, RealFile

LARGE = 1 << 18
MEMORY = Path("/dev/shm")


@pytest.fixture(params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file that is not there yet, on two kinds of file system."""
    found = tmp_path / "file"
    if request.param == "memory":
        if not MEMORY.is_dir():
            pytest.skip("no file system in memory here")
        found = MEMORY / f"diloco-test-{os.getpid()}"
    yield found
    found.unlink(missing_ok=True)


def _write_anything(path: Path, seed: int) -> bytes:
    """Writes of all sizes at all places; what the file must hold then."""
    draw = random.Random(seed)
    expected = bytearray()
    with RealDisk().open(path) as file:
        at = 0
        for _ in range(40):
            if draw.random() < 0.3:
                at = draw.randrange(len(expected) + 1)
                file.seek(at)
            size = draw.choice([1, 10, 4095, 4096, 5000, LARGE, LARGE + 4096, 3 * LARGE + 77])
            data = draw.randbytes(size)
            file.write(data)
            expected[at : at + size] = data
            at += size
        file.sync()
    return bytes(expected)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_written_is_there(path: Path, seed: int) -> None:
    expected = _write_anything(path, seed)
    assert path.read_bytes() == expected


def test_large_writes_pass_by_the_cache_and_small_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct: list[int] = []

    class Counted(disk._Direct):
        def write(self, pages: memoryview, offset: int) -> int:
            assert offset % 4096 == 0
            direct.append(super().write(pages, offset))
            return direct[-1]

    monkeypatch.setattr(disk, "_Direct", Counted)
    with RealDisk().open(tmp_path / "file") as file:
        file.write(bytes(100))
        file.write(bytes(LARGE))
        assert direct == [], "in whole pages it is less than that"
        file.write(bytes(2 * LARGE))
    assert sum(direct) == 2 * LARGE - 4096
    assert (tmp_path / "file").stat().st_size == 100 + 3 * LARGE


@pytest.mark.parametrize("what", ["open", "first", "later"])
def test_where_pages_cannot_pass_by_it_they_take_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    calls = 0

    class Unable(disk._Direct):
        def __init__(self, descriptor: int) -> None:
            if what == "open":
                raise OSError(errno.EINVAL, "no such way")
            super().__init__(descriptor)

        def write(self, pages: memoryview, offset: int) -> int:
            nonlocal calls
            calls += 1
            if calls > (1 if what == "later" else 0):
                raise OSError(errno.EINVAL, "not so")
            return super().write(pages, offset)

    monkeypatch.setattr(disk, "_Direct", Unable)
    expected = _write_anything(tmp_path / "file", 1)
    assert (tmp_path / "file").read_bytes() == expected


def test_what_found_no_room_is_refused_and_a_short_write_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(disk._Direct):
        room = LARGE + 5000

        def write(self, pages: memoryview, offset: int) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = os.pwrite(self._descriptor_cached(), pages[: self.room], offset)
            self.room -= written
            return written

        def _descriptor_cached(self) -> int:
            return cached.fileno()

    monkeypatch.setattr(disk, "_Direct", Full)
    data = random.Random(0).randbytes(4 * LARGE)
    place = tmp_path / "file"
    with place.open("wb", buffering=0) as cached:
        file = RealFile(cached)
        file.write(data)
        assert place.read_bytes() == data, "after a short one the cache tells whether there is room"
        with pytest.raises(OSError, match="No space left"):
            file.write(data)
        file.close()
