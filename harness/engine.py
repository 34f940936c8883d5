"""The container engine of this machine, by its own commands: `docker`, and Compose of any kind."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from fragments.errors import DilocoError

PROJECT_LABEL = "com.docker.compose.project"
"""What Compose marks all that it makes for a project with."""

_CALL_S = 60.0


def why_no_engine() -> str:
    """Why no containers can be run here, in a sentence; empty where they can."""
    if shutil.which("docker") is None:
        return "no container engine here: install docker (on Debian: docker.io, docker-compose)"
    try:
        done = call(["docker", "info", "--format", "{{.ServerVersion}}"], 30)
    except subprocess.TimeoutExpired:
        return "no container engine here: docker does not answer"
    if done.returncode != 0:
        return f"no container engine here: docker says {done.stderr.strip()}"
    if composer() is None:
        return "no Compose here: install docker-compose, or docker's compose plugin"
    return ""


def composer() -> list[str] | None:
    """The words of Compose: docker's plugin, or the program before it; None for neither."""
    if call(["docker", "compose", "version"], 30).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def left_of(project: str, kind: str) -> list[str]:
    """Ids of what there is of a project: its containers, networks or volumes, by `kind`."""
    everything = ["--all"] if kind == "container" else []
    chosen = ["--quiet", *everything, "--filter", f"label={PROJECT_LABEL}={project}"]
    return ask(["docker", kind, "ls", *chosen]).split()


def projects_at_rest(label: str) -> dict[str, str]:
    """Projects of whose containers with that label none runs: its value, by the project's name."""
    fields = ["{{.State}}", f'{{{{.Label "{PROJECT_LABEL}"}}}}', f'{{{{.Label "{label}"}}}}']
    words = ["docker", "ps", "--all", "--filter", f"label={label}", "--format", "\t".join(fields)]
    rows = [line.split("\t") for line in ask(words).splitlines()]
    running = {project for state, project, _value in rows if state == "running"}
    return {project: value for _state, project, value in rows if project not in running}


def remove(project: str) -> None:
    """Whatever there is of a project, and nothing else: containers, networks and volumes.

    Raises:
        DilocoError: where something of it is left, with what the engine says.
    """
    if containers := left_of(project, "container"):
        ask(["docker", "rm", "--force", "--volumes", *containers])
    for kind in ("network", "volume"):
        if found := left_of(project, kind):
            ask(["docker", kind, "rm", *found])


def ask(
    argv: Sequence[str], timeout_s: float = _CALL_S, environ: Mapping[str, str] | None = None
) -> str:
    """What a command prints.

    Raises:
        DilocoError: where it fails, with its last lines, or does not end in time.
    """
    try:
        done = call(argv, timeout_s, environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DilocoError(f"the container engine cannot be asked: {error}") from error
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise DilocoError(f"`{' '.join(argv[:4])} …` ended with {done.returncode}: {said}")
    return done.stdout


def call(
    argv: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; subprocess.TimeoutExpired where that takes longer."""
    given = os.environ if environ is None else environ
    return subprocess.run(
        argv,
        # Compose may be a program of another Python than this one.
        env={name: value for name, value in given.items() if name != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        # A Ctrl-C in the terminal is for whoever asks.
        start_new_session=True,
    )
