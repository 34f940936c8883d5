"""The committed stubs are what the pinned generators make of the protos."""

import subprocess
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).resolve().parents[2] / "protos"


def _files(root: Path) -> dict[str, bytes]:
    """Every file under `root` by relative path, without compiled Python."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("gen")
    subprocess.run(
        [sys.executable, PROTOS / "generate.py", "--out", out],
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    return _files(out)


def test_committed_stubs_equal_generated_ones(generated: dict[str, bytes]) -> None:
    committed = _files(PROTOS / "gen")
    assert sorted(committed) == sorted(generated), "run `make protos`"
    stale = [name for name in generated if committed[name] != generated[name]]
    assert not stale, "run `make protos`"


def test_every_proto_has_stubs_and_types(generated: dict[str, bytes]) -> None:
    sources = sorted(PROTOS.glob("diloco/**/*.proto"))
    assert sources
    for source in sources:
        stem = source.relative_to(PROTOS).with_suffix("").as_posix()
        for ending in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"):
            assert stem + ending in generated


def test_protos_that_do_not_compile_leave_the_stubs_alone(tmp_path: Path) -> None:
    copy = tmp_path / "protos"
    (copy / "diloco" / "v1").mkdir(parents=True)
    (copy / "generate.py").write_bytes((PROTOS / "generate.py").read_bytes())
    (copy / "diloco" / "v1" / "broken.proto").write_text('syntax = "proto3"; message {')
    kept = copy / "gen" / "diloco" / "kept.py"
    kept.parent.mkdir(parents=True)
    kept.write_text("")

    run = subprocess.run(
        [sys.executable, copy / "generate.py"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )

    assert run.returncode != 0
    assert "broken.proto:1:" in run.stderr
    assert "Traceback" not in run.stderr
    assert _files(copy / "gen") == {"diloco/kept.py": b""}
