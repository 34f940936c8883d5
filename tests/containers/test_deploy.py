"""deploy/ as it stands: each host a compose project with a network of its own, which meet at one
address of this machine, as hosts of a network do.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from fragments.records import LearnerState, RunStatus
from harness.engine import ask
from tests.containers.engine import ROOT, Project, learner

REGIONS = ("us-east", "eu-west")


@pytest.fixture
def meeting_address(image: str) -> Iterator[str]:
    """Of this machine, in a network that nothing else is in: so its ports are free."""
    del image  # It says whether there is an engine.
    name = f"diloco-test-{secrets.token_hex(4)}"
    ask(["docker", "network", "create", name])
    try:
        (network,) = json.loads(ask(["docker", "network", "inspect", name]))
        yield str(network["IPAM"]["Config"][0]["Gateway"])
    finally:
        ask(["docker", "network", "rm", name])


def host(image: str, kind: str, place: Path, settings: Mapping[str, str]) -> Project:
    """A host's part, by a copy of the environment file in which its person has set these."""
    lines = (ROOT / "deploy" / f"{kind}.env").read_text("utf-8").splitlines()
    keys = {line.partition("=")[0] for line in lines}
    assert settings.keys() <= keys, "whatever is to be set has its line there"
    kept = [line for line in lines if line.partition("=")[0] not in settings]
    place.write_text("\n".join([*kept, *(f"{k}={v}" for k, v in settings.items()), ""]), "utf-8")
    return Project(image, {}, [f"deploy/compose.{kind}.yml"], place)


def both_train(status: RunStatus) -> bool:
    """Does every region train?"""
    states = {one.name: one.state for one in status.learners}
    return all(states.get(name) is LearnerState.TRAINING for name in REGIONS)


@pytest.mark.timeout(600)
def test_hosts_train_one_run_and_each_can_be_stopped_and_come_back(
    image: str, meeting_address: str, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "mymodel.py").write_text("from learner.reference.program import build as build\n")
    (own / "text.txt").write_text(" ".join(f"line {i} of text\n" for i in range(20_000)))
    ours = {"OWN_DIR": str(own), "DATA": "/own/*.txt"}
    with ExitStack() as stack:
        settings = {
            **ours,
            "PROGRAM": "mymodel:build",
            "LISTEN": meeting_address,
            "LEARNERS": "2",
            "BUDGET_TOKENS": "1000000000",
        }
        server = stack.enter_context(host(image, "server", tmp_path / "server.env", settings))
        regions = {
            name: stack.enter_context(
                host(
                    image,
                    "region",
                    tmp_path / f"{name}.env",
                    {
                        **ours,
                        "REGION": name,
                        "SERVER": f"{meeting_address}:7700",
                        "CAP_UP_MBIT": "20",
                    },
                )
            )
            for name in REGIONS
        }
        # The order of starting does not matter.
        regions["us-east"].up()
        server.up()
        regions["eu-west"].up()
        status = server.until(both_train, 240, "both train")
        merged = status.rounds_merged
        server.until(lambda s: s.rounds_merged >= merged + 8, 120, "rounds are merged")
        assert learner(status, "us-east").cap_up_mbit == 20
        spec = json.loads(server.compose("exec", "-T", "server", "cat", "run/run.json"))["spec"]
        assert spec["program"]["factory"] == "mymodel:build"

        written = server.compose("exec", "-T", "server", "diloco", "snapshot")
        name = next(word for word in written.split() if word.strip(".,").isdigit()).strip(".,")
        weights = f"run/snapshots/{name}/weights.safetensors"
        server.compose("exec", "-T", "server", "test", "-s", weights)

        regions["eu-west"].compose("down")
        status = server.until(lambda s: not both_train(s), 60, "a region has left")
        merged = status.rounds_merged
        server.until(lambda s: s.rounds_merged >= merged + 4, 120, "the other trains on")
        steps = learner(status, "eu-west").steps
        regions["eu-west"].up()
        server.until(both_train, 120, "it is back")
        server.until(lambda s: learner(s, "eu-west").steps > steps, 60, "and trains on")

        before = server.until(both_train, 60, "both train")
        server.compose("restart", "server")
        after = server.until(
            lambda s: s.generation > before.generation and both_train(s), 120, "they are back"
        )
        assert (after.run_id, after.epoch) == (before.run_id, before.epoch)
        assert after.rounds_merged >= before.rounds_merged

        told = server.compose(
            "exec", "-T", "server", "diloco", "admin", "set", "budget_tokens=trained"
        )
        assert "the run ends now" in told
        for region in regions.values():
            said = region.compose("up", "--no-build", timeout_s=120)
            assert "is finished" in said
            assert region.inspect("learner", "{{.State.ExitCode}}") == "0"
        exported = "run", "--rm", "--no-deps", "server", "export", "run", "weights.safetensors"
        server.compose("stop", "server", timeout_s=120)
        assert "weights.safetensors" in server.compose(*exported)
        for project in (*regions.values(), server):
            project.compose("down", "--volumes")
            assert [project.left(kind) for kind in ("container", "network", "volume")] == [
                [],
                [],
                [],
            ]
