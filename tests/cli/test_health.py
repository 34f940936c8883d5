"""`diloco health` against real processes' health services."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli import exit as exits
from cli.main import main
from harness.environment import child_environment
from services.health import AdminHealth
from tests.cli.test_members import served, tiny_run


def test_it_says_what_a_process_says(capsys: pytest.CaptureFixture[str]) -> None:
    health = AdminHealth(0)
    try:
        assert main(["health", str(health.address)]) == exits.OTHER
        assert "is not serving" in capsys.readouterr().err
        health.serving = True
        assert main(["health", str(health.address)]) == exits.OK
        assert capsys.readouterr().out == "SERVING\n"
    finally:
        health.stop()
    assert main(["health", str(health.address), "--timeout-s", "2"]) == exits.UNREACHABLE
    assert "no health service answers" in capsys.readouterr().err


def test_a_check_of_a_server_is_cheap(tmp_path: Path) -> None:
    """It runs every few seconds beside whoever trains: nothing that compiles is imported."""
    code = (
        "import sys\n"
        "from cli.main import main\n"
        "assert main(['health', sys.argv[1]]) == 0\n"
        "print(sorted({'jax', 'numba', 'numpy'} & set(sys.modules)))\n"
    )
    with served(tiny_run(tmp_path / "run")) as (address, _):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, address],
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stdout.splitlines() == ["SERVING", "[]"], done.stderr
