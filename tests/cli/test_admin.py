"""`diloco admin` as a person meets it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cli import exit as exits
from cli.main import main
from harness.environment import child_environment, command
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from services.outer.server import OuterServices
from services.settings import ServerSettings
from tests.support.tiny import tiny_birth, tiny_spec


def test_each_verb_prints_what_has_become_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_run(tmp_path / "run", tiny_spec(), *tiny_birth(tiny_spec()))
    with OuterServer(tmp_path / "run") as outer:
        services = OuterServices(
            outer, ServerSettings(address="127.0.0.1:0", bulk_port=0), outer.admin
        )
        services.start()
        try:

            def said(*words: str, code: int = exits.OK) -> str:
                assert main(["admin", *words, "--address", str(services.address)]) == code
                captured = capsys.readouterr()
                # The server of this process logs to the same place.
                return (captured.out if code == exits.OK else captured.err).splitlines()[-1]

            assert said("drain", "--reason", "x").startswith("drained: no round opens")
            assert said("drain").startswith("nothing to do: drained")
            assert said("release") == "released: rounds open again"
            assert said("release", "eu") == "nothing to do: eu was not evicted"
            assert said("set", "quorum=2", "outer.nesterov=false") == (
                "quorum: 2 instead of 1; outer.nesterov: False instead of True"
            )
            written = json.loads(said("snapshot", "--json"))
            assert written["snapshot"] == "000001"
            back = said("rollback", "--to", "1", "--reason", "y")
            assert back.startswith("gone back to snapshot 000001 in epoch 2")
            assert "there is no 'eu'" in said("evict", "eu", code=exits.USAGE)
            assert "give KEY=VALUE" in said("set", "quorum", code=exits.USAGE)
            assert "CHANGES is missing" in said("set", code=exits.USAGE)
            both = said("rollback", "--to", "1", "--to-version", "3", code=exits.USAGE)
            assert "give one of them" in both
        finally:
            services.stop()
    assert main(["admin", "drain", "--address", "127.0.0.1:1"]) == exits.UNREACHABLE
    assert main(["admin"]) == exits.USAGE
    assert "admin needs one more word: admin drain" in capsys.readouterr().err


def test_a_served_run_is_stopped_with_its_state_kept(tmp_path: Path) -> None:
    run = tmp_path / "run"
    create_run(run, tiny_spec(), *tiny_birth(tiny_spec()))
    server = subprocess.Popen(
        command("serve", str(run), "--address", "127.0.0.1:0", "--bulk-port", "0"),
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline().startswith("serving run tiny")
    address = json.loads((run / "address.json").read_text())["address"]
    assert main(["admin", "stop", "--address", address, "--reason", "new kernel"]) == exits.OK
    out, error = server.communicate(timeout=60)
    assert server.returncode == 0, error
    assert f"the state is in {run}" in out
    assert "stopped by an operator (new kernel)" in error
    record = json.loads((run / "server.json").read_text())
    assert (record["clean"], record["snapshot"]) == (True, "000001")
