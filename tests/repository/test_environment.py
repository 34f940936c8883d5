"""The locked environment: complete, hashed, and the one that these tests run in."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


LOCKS = ["requirements.lock", *(f"docker/locks/{n}.lock" for n in ("build", "cpu", "cuda", "tpu"))]


def _locked(name: str = "requirements.lock") -> dict[str, tuple[Requirement, int]]:
    """Each locked requirement by canonical name, with its number of hashes."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    locked: dict[str, tuple[Requirement, int]] = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            requirement, *hashes = re.split(r"\s+--hash=sha256:(?=[0-9a-f]{64}\b)", line)
            parsed = Requirement(requirement)
            locked[canonicalize_name(parsed.name)] = (parsed, len(hashes))
    return locked


def _declared() -> list[Requirement]:
    """What pyproject.toml asks for, tools included."""
    texts = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_version_is_exact_and_hashed(lock: str) -> None:
    for name, (requirement, hashes) in _locked(lock).items():
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), name
        assert requirement.url is None, name
        assert hashes > 0, name


def test_the_lock_holds_what_the_project_declares() -> None:
    locked = _locked()
    for wanted in _declared():
        requirement, _ = locked[canonicalize_name(wanted.name)]
        version = str(requirement.specifier).removeprefix("==")
        assert wanted.specifier.contains(version, prereleases=True), "run `make lock`"


@pytest.mark.parametrize("lock", LOCKS[1:])
def test_the_image_has_the_versions_that_are_tested(lock: str) -> None:
    """What it adds to them is an accelerator's; `make lock` renews all locks together."""
    tested = _locked()
    own = _locked(lock)
    shared = [name for name in own if name in tested]
    assert [str(own[name]) for name in shared] == [str(tested[name]) for name in shared]
    runtime = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    tools = {canonicalize_name(requirement.name) for requirement in _declared()} - runtime
    if lock.endswith("build.lock"):
        assert "hatchling" in own
        return
    assert runtime <= set(own)
    assert not (tools - {"packaging"}) & set(own)


def test_this_environment_is_the_locked_one() -> None:
    for name, (requirement, _) in _locked().items():
        if requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(importlib.metadata.version(name)), name


def test_stub_generators_are_pinned_exactly() -> None:
    pinned = {r.name for r in _declared() if str(r.specifier).startswith("==")}
    assert pinned == {"grpcio-tools", "mypy-protobuf"}


def test_the_runtime_is_no_older_than_the_generated_stubs_need() -> None:
    """A user may resolve to the lower bounds; the stubs must load there too."""
    bounds = {
        r.name: str(r.specifier).removeprefix(">=")
        for r in _declared()
        if r.name in ("grpcio", "protobuf")
    }
    for stub in (ROOT / "protos" / "gen").rglob("*_pb2.py"):
        generated = re.search(r"# Protobuf Python Version: (\S+)", stub.read_text("utf-8"))
        assert generated is not None
        assert _numbers(bounds["protobuf"]) >= _numbers(generated[1]), stub.name
    for stub in (ROOT / "protos" / "gen").rglob("*_pb2_grpc.py"):
        generated = re.search(r"GRPC_GENERATED_VERSION = '(\S+)'", stub.read_text("utf-8"))
        assert generated is not None
        assert _numbers(bounds["grpcio"]) >= _numbers(generated[1]), stub.name


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
