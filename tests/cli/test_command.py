"""The command as a person meets it: sentences, exit codes, and no jax where none is needed."""

from __future__ import annotations

import inspect
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fragments.errors
from cli import exit as exits
from cli.main import main
from cli.verbs import NAMES
from fragments.errors import DilocoError
from harness.environment import child_environment, command
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from services.outer.server import OuterServices
from services.settings import ServerSettings
from tests.support.tiny import tiny_birth, tiny_spec

FREE = ServerSettings(address="127.0.0.1:0", bulk_port=0)


def test_no_words_print_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == exits.USAGE
    assert main(["--help"]) == exits.OK
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in NAMES)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sevre"], "there is no `diloco sevre`: did you mean serve?"),
        (["run", "--out", "o", "--data", ""], "--data"),
        (["serve", "o", "--weight"], "diloco serve has no flag --weight\n"),
        (["init", "o", "--quorum", "3", "--max-learners", "2"], "quorum is above max_learners"),
        (["study"], "diloco study needs one more word: study run"),
        (["bench", "--params", "25X"], "25X is no number of parameters between 1k and 2G"),
        (["bench", "--pairs", "3"], "diloco bench has no flag --pairs"),
        (["bench", "space"], "there is no `diloco bench space`: did you mean bench pace?"),
        (["admin", "foo"], "there is no `diloco admin foo`: there are admin drain, "),
        (["learn", "--nome", "x"], "diloco learn has no flag --nome: did you mean --name?"),
        (["run", "--out", "o", "--preset", "demon"], "there is no preset demon; there are: demo"),
        (["run", "--out", "o", "--kill", "eu-west"], "--kill eu-west: give NAME@STEP"),
    ],
)
def test_usage_errors_are_one_sentence_and_code_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == exits.USAGE
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("word", ["bench", "study"])
def test_help_of_a_family_lists_its_verbs(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "--help"]) == exits.OK
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in NAMES if name.startswith(word + " "))


def test_the_directory_above_a_run_is_told_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_run(tmp_path / "run", tiny_spec(), *tiny_birth(tiny_spec()))
    assert main(["serve", str(tmp_path)]) == exits.RUN_DIRECTORY
    assert f"but {tmp_path / 'run'} is" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--address", "--bulk-port"])
def test_a_port_in_use_names_its_flag(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = {"--address": "127.0.0.1:0", "--bulk-port": "0"}
        given[flag] = f"127.0.0.1:{port}" if flag == "--address" else str(port)
        words = [word for pair in given.items() for word in pair]
        assert main(["serve", str(tmp_path / "none"), *words]) == exits.USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"diloco: {flag} {given[flag]}: 127.0.0.1:{port} is in use")
    assert error.count("\n") == 1


def test_nobody_there_is_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    # Port 1 of loopback: reserved, and nothing of ours listens there.
    assert main(["status", "--address", "127.0.0.1:1"]) == exits.UNREACHABLE
    assert "check that `diloco serve` runs there" in capsys.readouterr().err


def test_a_directory_that_is_no_run_is_code_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(
        command("serve", str(tmp_path), "--address", "127.0.0.1:0"),
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == exits.RUN_DIRECTORY
    assert done.stderr.startswith(f"diloco: {tmp_path} is not a run directory")
    assert "Traceback" not in done.stderr


def test_every_domain_error_has_a_code_of_the_table() -> None:
    kinds = [
        kind
        for _, kind in inspect.getmembers(fragments.errors, inspect.isclass)
        if issubclass(kind, DilocoError)
    ]
    codes = {kind: exits.exit_code(kind.__new__(kind)) for kind in kinds}
    assert codes[fragments.errors.SettingsError] == exits.USAGE
    assert codes[fragments.errors.UnreachableError] == exits.UNREACHABLE
    assert codes[fragments.errors.RefusedError] == exits.REFUSED
    assert codes[fragments.errors.RunDirectoryError] == exits.RUN_DIRECTORY
    documented = exits.__doc__ or ""
    assert all(f"\n| {code} |" in documented for code in codes.values())


def _without_jax(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process that fails if jax was imported by the end."""
    script = (
        "import sys\n"
        "from cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'jax', 'matplotlib', 'optax'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", script, *words],
        env=child_environment(),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("words", [["--help"], *([*name.split(), "--help"] for name in NAMES)])
def test_help_imports_no_jax(words: list[str]) -> None:
    done = _without_jax(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: diloco")


def test_status_of_a_real_server_imports_no_jax_and_tells_everything(tmp_path: Path) -> None:
    spec = tiny_spec(run_id="looked-at")
    create_run(tmp_path / "run", spec, *tiny_birth(spec))
    with OuterServer(tmp_path / "run") as outer:
        services = OuterServices(outer, FREE)
        services.start()
        try:
            address = str(services.address)
            shown = _without_jax("status", "--address", address)
            as_json = _without_jax("status", "--address", address, "--json")
        finally:
            services.stop()
    assert shown.returncode == 0, shown.stderr
    assert "looked-at" in shown.stdout
    assert "no learner has joined yet" in shown.stdout
    status = json.loads(as_json.stdout)
    assert status["run_id"] == "looked-at"
    assert status["tokens_budget"] == spec.budget_tokens
    assert [fragment["version"] for fragment in status["fragments"]] == [0, 0]
