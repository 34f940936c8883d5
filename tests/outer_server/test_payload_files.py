"""The files that hold contributions, where a disk is slow, fails or is full."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fragments.disk import RealDisk, RealFile
from fragments.errors import StorageError
from outer_server.store import payloads
from outer_server.store.payloads import PayloadFiles

WAIT_S = 20.0


class Slow(RealFile):
    """A sync of this one takes until it is let go."""

    def __init__(self, file: RealFile, disk: Patient) -> None:
        super().__init__(file._file)
        self._disk = disk

    def write(self, data: bytes | memoryview) -> None:
        if self._disk.is_full:
            raise OSError(28, "No space left on device")
        super().write(data)

    def sync(self) -> None:
        self._disk.syncing.set()
        assert self._disk.may_end.wait(WAIT_S)
        super().sync()

    def close(self) -> None:
        self._disk.open_files.discard(self)
        super().close()


class Patient(RealDisk):
    """Syncs take as long as the test lets them."""

    def __init__(self) -> None:
        self.syncing, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.is_full = self.has_lost_directory = False
        self.open_files: set[Slow] = set()

    def open(self, path: Path) -> Slow:
        file = Slow(super().open(path), self)
        self.open_files.add(file)
        return file

    def sync_directory(self, path: Path) -> None:
        if self.has_lost_directory:
            raise OSError(5, "Input/output error")
        super().sync_directory(path)


def _put(files: PayloadFiles, data: bytes) -> None:
    with files.kept(data):
        pass


def _names(at: Path) -> list[str]:
    return sorted(each.name for each in at.iterdir())


def test_nobody_waits_for_anothers_sync_when_a_file_is_full(tmp_path: Path) -> None:
    disk = Patient()
    files = PayloadFiles(disk, tmp_path, file_bytes=4)
    disk.may_end.clear()
    pushers = [threading.Thread(target=_put, args=(files, b"12345"))]
    pushers[0].start()
    assert disk.syncing.wait(WAIT_S)
    # The file is full now; whoever comes next begins another while the first is being synced.
    pushers.append(threading.Thread(target=_put, args=(files, b"67890")))
    pushers[1].start()
    for _ in range(1000):
        if _names(tmp_path) == ["000001.bin", "000002.bin"]:
            break
        threading.Event().wait(0.01)
    dropper = threading.Thread(target=files.drop_before, args=(1,))
    dropper.start()
    dropper.join(WAIT_S)
    assert not dropper.is_alive(), "the engine's thread does not wait either"
    assert _names(tmp_path) == ["000001.bin", "000002.bin"]
    disk.may_end.set()
    for pusher in pushers:
        pusher.join(WAIT_S)
    assert len(disk.open_files) == 1, "the full one is closed"
    files.close()
    assert not disk.open_files


def test_what_a_disk_refuses_leaves_neither_files_nor_descriptors(tmp_path: Path) -> None:
    disk = Patient()
    files = PayloadFiles(disk, tmp_path)
    _put(files, b"12345")
    disk.is_full = True
    for _ in range(10):
        with pytest.raises(StorageError, match="No space left"):
            _put(files, b"67890")
    assert _names(tmp_path) == ["000001.bin"]
    assert not disk.open_files
    disk.is_full = False
    disk.has_lost_directory = True
    for _ in range(10):
        with pytest.raises(StorageError, match="Input/output"):
            _put(files, b"67890")
    assert _names(tmp_path) == ["000001.bin"]
    assert not disk.open_files
    disk.has_lost_directory = False
    _put(files, b"67890")
    assert files.trouble == ""
    files.close()


def test_nothing_is_added_once_they_are_closed(tmp_path: Path) -> None:
    disk = Patient()
    files = PayloadFiles(disk, tmp_path)
    files.close()
    with pytest.raises(StorageError, match="stopping"):
        _put(files, b"12345")
    assert _names(tmp_path) == []


def test_trouble_is_told_until_it_is_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Patient()
    files = PayloadFiles(disk, tmp_path)
    disk.is_full = True
    with pytest.raises(StorageError):
        _put(files, b"12345")
    assert "No space left" in files.trouble
    monkeypatch.setattr(payloads, "TROUBLE_S", -1.0)
    assert files.trouble == ""
