"""A compose project on the machine's container engine, of which nothing stays behind."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fragments.errors import DilocoError
from fragments.records import LearnerStatus, RunStatus
from harness.engine import call, composer, left_of, remove
from services.client.status import watch_status

ROOT = Path(__file__).resolve().parents[2]

LOOK_S = 0.5
"""Seconds between two looks at the status of a run."""


def build_image(name: str) -> None:
    """Builds the image; AssertionError with the build's last lines when it fails."""
    _checked([str(ROOT / "docker" / "build"), name], 900)


class Project:
    """The top-level docker-compose.yml, with overlays, or other compose files and an environment
    file, under a name of its own. The top-level one has no fixed port on the host.

    A context manager: at its end, however it comes, containers, networks and volumes are removed
    by the project's label.
    """

    def __init__(
        self,
        image: str,
        settings: Mapping[str, str],
        files: Sequence[str] = ("docker-compose.yml",),
        env_file: Path | None = None,
    ) -> None:
        self.name = f"diloco-test-{secrets.token_hex(4)}"
        self._environ = {**os.environ, "IMAGE": image, "STATUS_PORT": "0"}
        self._environ |= {"DILOCO_LOG_LEVEL": "info", **settings}
        self._files = [word for file in files for word in ("--file", str(ROOT / file))]
        if env_file is not None:
            self._files += ["--env-file", str(env_file)]

    def __enter__(self) -> Project:
        return self

    def __exit__(self, *_exc: object) -> None:
        remove(self.name)

    def compose(self, *words: str, timeout_s: float = 180) -> str:
        """`docker compose WORDS`; what it printed. AssertionError when it fails."""
        program = composer()
        assert program is not None
        argv = [*program, "--project-name", self.name, *self._files]
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
        call(["docker", "exec", self.container(service), "sh", "-c", "kill -9 -1"], 60)

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
        return left_of(self.name, kind)

    def _network(self) -> str:
        (network,) = self.left("network")
        return network


def learner(status: RunStatus, name: str) -> LearnerStatus:
    """The learner of that name; KeyError before it has joined."""
    return {one.name: one for one in status.learners}[name]


def _checked(argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> str:
    done = call(argv, timeout_s, env)
    said = "\n".join((done.stdout + done.stderr).splitlines()[-60:])
    assert done.returncode == 0, f"{' '.join(argv)} ended with {done.returncode}:\n{said}"
    return done.stdout
