"""A compose project on the machine's container engine, of which nothing stays behind."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fragments.errors import DilocoError
from fragments.records import LearnerStatus, RunStatus
from services.client.status import watch_status

ROOT = Path(__file__).resolve().parents[2]

LOOK_S = 0.5
"""Seconds between two looks at the status of a run."""

_LABEL = "com.docker.compose.project"


def why_no_engine() -> str:
    """Why no containers can be run here, in a sentence; empty where they can."""
    if shutil.which("docker") is None:
        return "no container engine here: install docker (on Debian: docker.io, docker-compose)"
    try:
        told = _call(["docker", "info", "--format", "{{.ServerVersion}}"], 30)
    except subprocess.TimeoutExpired:
        return "no container engine here: docker does not answer"
    if told.returncode != 0:
        return f"no container engine here: docker says {told.stderr.strip()}"
    if _composer() is None:
        return "no Compose here: install docker-compose, or docker's compose plugin"
    return ""


def build_image(name: str) -> None:
    """Builds the image; AssertionError with the build's last lines when it fails."""
    _checked([str(ROOT / "docker" / "build"), name], 900)


class Project:
    """The top-level docker-compose.yml under a name of its own, with no fixed port on the host.

    A context manager: at its end, however it comes, containers, networks and volumes are removed
    by the project's label.
    """

    def __init__(self, image: str, settings: Mapping[str, str]) -> None:
        self.name = f"diloco-test-{secrets.token_hex(4)}"
        self._environ = {**os.environ, "IMAGE": image, "STATUS_PORT": "0"}
        self._environ |= {"DILOCO_LOG_LEVEL": "info", **settings}

    def __enter__(self) -> Project:
        return self

    def __exit__(self, *_exc: object) -> None:
        for container in self.left("container"):
            _call(["docker", "rm", "--force", "--volumes", container], 60)
        for kind in ("network", "volume"):
            for one in self.left(kind):
                _call(["docker", kind, "rm", one], 60)

    def compose(self, *words: str, timeout_s: float = 180) -> str:
        """`docker compose WORDS`; what it printed. AssertionError when it fails."""
        composer = _composer()
        assert composer is not None
        argv = [*composer, "--project-name", self.name, "--file", str(ROOT / "docker-compose.yml")]
        return _checked([*argv, *words], timeout_s, self._environ)

    def up(self) -> None:
        """Everything that is not there yet, in the background."""
        self.compose("up", "--detach", "--no-build", timeout_s=420)

    def container(self, service: str) -> str:
        """The id of the service's container."""
        return self.compose("ps", "--quiet", service).strip()

    def inspect(self, service: str, template: str) -> str:
        """One fact about the service's container, by a Go template."""
        container = self.container(service)
        return _checked(["docker", "inspect", "--format", template, container], 30).strip()

    def kill(self, service: str) -> None:
        """kill -9 of the service's process, as the machine's memory killer would.

        Not `docker kill`, after which the engine restarts nothing: that is a person's wish.
        """
        # Every process of the container but its init and the asking shell; the answer is cut short
        # when the container ends first.
        _call(["docker", "exec", self.container(service), "sh", "-c", "kill -9 -1"], 60)

    def cut(self, service: str) -> None:
        """Takes the service's container off the network."""
        _checked(["docker", "network", "disconnect", self._network(), self.container(service)], 60)

    def mend(self, service: str) -> None:
        """Undoes `cut`."""
        network, container = self._network(), self.container(service)
        _checked(["docker", "network", "connect", "--alias", service, network, container], 60)

    def logs(self, *services: str, lines: int = 40) -> str:
        """What the services said last."""
        return self.compose("logs", "--no-color", f"--tail={lines}", *services)

    def address(self) -> str:
        """Where this machine reaches the server: another port after each of its starts."""
        return self.compose("port", "server", "7700").strip()

    def until(self, is_so: Callable[[RunStatus], bool], limit_s: float, what: str) -> RunStatus:
        """Follows the run's status until `is_so`, and returns that one.

        A server that is away is waited for. AssertionError, with the end of the logs, when it is
        not so within `limit_s`.
        """
        deadline_s = time.monotonic() + limit_s
        last: RunStatus | None = None
        while time.monotonic() < deadline_s:
            try:
                for last in watch_status(self.address(), LOOK_S):
                    if is_so(last):
                        return last
                    if time.monotonic() > deadline_s:
                        break
            except (AssertionError, DilocoError):
                time.sleep(LOOK_S)  # the server is being started; nothing else tells when it is up
        raise AssertionError(f"{what}: not within {limit_s:g} s\n{last}\n{self.logs()}")

    def left(self, kind: str) -> list[str]:
        """Ids of what there is of the project: containers, networks or volumes."""
        everything = ["--all"] if kind == "container" else []
        words = ["ls", "--quiet", *everything, "--filter", f"label={_LABEL}={self.name}"]
        return _checked(["docker", kind, *words], 60).split()

    def _network(self) -> str:
        (network,) = self.left("network")
        return network


def learner(status: RunStatus, name: str) -> LearnerStatus:
    """The learner of that name; KeyError before it has joined."""
    return {one.name: one for one in status.learners}[name]


def _composer() -> list[str] | None:
    """The words of Compose: docker's plugin, or the program that came before it."""
    if _call(["docker", "compose", "version"], 30).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def _checked(argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> str:
    done = _call(argv, timeout_s, env)
    said = "\n".join((done.stdout + done.stderr).splitlines()[-60:])
    assert done.returncode == 0, f"{' '.join(argv)} ended with {done.returncode}:\n{said}"
    return done.stdout


def _call(
    argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
