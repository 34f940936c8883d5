"""A run in containers: a compose project of its own, of which nothing stays."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from fragments.errors import DilocoError, SettingsError
from harness.compose import BULK, CONTROL, HELD_LABEL, WAN, Mounted, Project
from harness.engine import ask, call, composer, projects_at_rest, remove, why_no_engine
from harness.ground import Terms
from harness.link import LinkShape, Steered
from harness.plan import EVALUATOR, SERVER
from harness.ports import free_ports
from harness.processes import Command, Supervisor, last_words
from harness.regions import Region, RegionMap
from harness.toml import to_toml

_UP_S = 300.0
_CALL_S = 60.0
_LOOK_S = 0.05
STOP_WITHIN_S = 60.0
"""What a run in containers may take to end after it was told to stop: the engine removes one after
another."""

_START_S = 60.0
"""Longest wait for a container to run."""


def require_image(image: str) -> None:
    """Raises SettingsError where no container can be run, or none of that image."""
    if sys.platform != "linux":
        raise SettingsError(
            "runs in containers are watched by this machine's clock and process ids, which they"
            " share on Linux alone; `docker compose up` works elsewhere too"
        )
    if reason := why_no_engine():
        raise SettingsError(reason)
    if call(["docker", "image", "inspect", image], _CALL_S).returncode != 0:
        raise SettingsError(
            f"there is no image {image} here: `docker/build {image}` makes it from a checkout"
        )


class Containers:
    """A `harness.ground.Ground`: each process is a container, learners dial `wan`.

    Args:
        image: of this project, by name; it is not pulled.
        out: what all processes read and write.
        shapes: of the learners' links, by name.
        data: what they train on, if not what the image has.

    Raises:
        SettingsError: see `require_image`.
    """

    def __init__(
        self, image: str, out: Path, shapes: Mapping[str, LinkShape], data: str | None = None
    ) -> None:
        require_image(image)
        (port,) = free_ports(1)
        self._project = Project(
            name=f"diloco-{secrets.token_hex(4)}",
            image=image,
            out=out.absolute(),
            user=(os.getuid(), os.getgid()),
            port=port,
            links=out.absolute() / "links",
            data=Mounted.of(data) if data is not None else None,
        )
        self.processes = Supervisor(spawn=self._spawn, handle_kind="container")
        self.terms = Terms(
            "0.0.0.0",
            (CONTROL, BULK),
            ("--insecure",),
            f"127.0.0.1:{port}",
            is_tied=False,
            environ=self._project.environ,
        )
        self._map = _Map(self._project.map, {name: _region(each) for name, each in shapes.items()})
        self.links: Mapping[str, Steered] = {name: _Link(self._map, name) for name in shapes}
        self._held: IO[bytes] | None = None
        self._lives = 0

    def __enter__(self) -> Self:
        """Until the end the file `held` is locked: whatever ends this process, the kernel unlocks
        it, and all containers end.
        """
        _sweep()
        self._project.links.mkdir(parents=True, exist_ok=True)
        self._held = self._project.held.open("wb")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            with self.processes:
                pass
        finally:
            try:
                self._keep_log()
                remove(self._project.name)
            finally:
                if self._held is not None:
                    self._held.close()

    @property
    def project(self) -> str:
        """The compose project's name."""
        return self._project.name

    def seen(self, data: str | None) -> str | None:
        """See `Ground`; `data` is what was given before."""
        return self._project.data.pattern if self._project.data is not None else data

    def prepare(self, commands: Sequence[Command]) -> None:
        """See `Ground`. Makes the containers, and starts the network between them.

        Raises:
            DilocoError: where Compose cannot make them.
        """
        for directory in ("cache", "logs"):
            # What the engine makes for want of it, would be root's.
            (self._project.out / directory).mkdir(exist_ok=True)
        file = self._project.out / "compose.json"
        file.write_text(json.dumps(self._project.file(commands), indent=2) + "\n", encoding="utf-8")
        self._map.write()
        words = [*(composer() or ()), "--project-name", self.project, "--file", str(file), "up"]
        # Process ids can be shared with a container only that runs.
        ask([*words, "--detach", "--no-build", WAN], _UP_S)
        self._await_wan()
        ask([*words, "--no-start", "--no-build", "--no-recreate"], _UP_S)

    def open(self, address: str, bulk_port: int) -> None:
        """See `Ground`. They have led there from the beginning."""

    def dialled(self, name: str, address: str) -> str:
        """See `Ground`. The evaluator is at the server's."""
        return f"{SERVER if name == EVALUATOR else WAN}:{CONTROL}"

    def carried_bytes(self) -> dict[str, tuple[int, int]]:
        """See `Ground`; as of some tenths of a second ago."""
        try:
            told = json.loads(self._project.carried.read_text(encoding="utf-8"))
        except OSError:
            return {}
        return {name: (int(up), int(down)) for name, (up, down) in told.items()}

    def _spawn(self, command: Command) -> ContainerProcess:
        self._lives += 1
        name = self._project.container(command.name)
        return ContainerProcess(name, command.log, unknown_pid=-self._lives)

    def _await_wan(self) -> None:
        """Until it has written something that is seen here, as what the others write must be."""
        deadline_s = time.monotonic() + _START_S
        while not self._project.carried.exists():
            if time.monotonic() > deadline_s or not self._wan_runs():
                self._keep_log()
                words = last_words(self._wan_log) or f"its log is {self._wan_log}"
                raise DilocoError(
                    f"the container {self._project.container(WAN)} does not do its work in"
                    f" {self._project.out}; is the image of this version? {words}"
                )
            time.sleep(_LOOK_S)

    def _wan_runs(self) -> bool:
        words = ["docker", "inspect", "--format", "{{.State.Running}}"]
        return ask([*words, self._project.container(WAN)]).strip() == "true"

    @property
    def _wan_log(self) -> Path:
        return self._project.out / "logs" / f"{WAN}.log"

    def _keep_log(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            told = call(["docker", "logs", self._project.container(WAN)], _CALL_S)
            self._wan_log.write_text(told.stdout + told.stderr, encoding="utf-8")


class ContainerProcess:
    """A `harness.processes.Running`: the first process of a container that is made already. What
    it prints goes to `log`.

    Raises:
        DilocoError: where the container does not start.
    """

    def __init__(self, container: str, log: Path, unknown_pid: int) -> None:
        self.handle = container
        # This one lives as long as the container's process, and ends with its exit code.
        with log.open("ab") as lines:
            self._client = subprocess.Popen(
                ["docker", "start", "--attach", container],
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # One that has ended already is not asked.
        self.pid = self._pid() or unknown_pid

    def poll(self) -> int | None:
        """See `Running`."""
        code = self._client.poll()
        return None if code is None else _as_signal(code)

    def wait(self, timeout_s: float | None = None) -> int:
        """See `Running`."""
        return _as_signal(self._client.wait(timeout_s))

    def send(self, number: signal.Signals) -> None:
        """See `Running`."""
        if self._client.poll() is None:
            # One that ends meanwhile is no failure.
            call(["docker", "kill", "--signal", number.name, self.handle], _CALL_S)

    def release(self) -> None:
        """See `Running`. There is nothing."""

    def _pid(self) -> int | None:
        """In its own namespace: what it takes itself for."""
        words = ["docker", "inspect", "--format", "{{.State.Running}} {{.State.Pid}}"]
        deadline_s = time.monotonic() + _START_S
        while self._client.poll() is None:
            is_running, here = ask([*words, self.handle]).split()
            if is_running == "true":
                return _innermost(int(here))
            if time.monotonic() > deadline_s:
                raise DilocoError(f"{self.handle} did not start within {_START_S:g} s")
            time.sleep(_LOOK_S)
        return None


def _innermost(pid: int) -> int | None:
    """What a process of this machine is called in the innermost namespace that it is in; None where
    it is gone.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    ids = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    return int(ids.split()[-1])


def _as_signal(code: int) -> int:
    """A shell's way to tell of a signal, as Python's."""
    return 128 - code if code > 128 else code


class _Map:
    """The links of the project, as they are to be: written anew with each change."""

    def __init__(self, path: Path, regions: Mapping[str, Region]) -> None:
        self._path = path
        self._regions = dict(regions)

    def change(self, name: str, **what: object) -> None:
        changed = self._regions[name].model_copy(update=what)
        self._regions[name] = changed
        self.write()

    def write(self) -> None:
        whole = RegionMap(regions=self._regions)
        tables = {
            f"regions.{json.dumps(name)}": region.model_dump(exclude_defaults=True)
            for name, region in whole.regions.items()
        }
        part = self._path.with_suffix(".part")
        part.write_text(to_toml(tables), encoding="utf-8")
        part.replace(self._path)


class _Link:
    """A `Steered`, by the map that `wan` follows."""

    def __init__(self, regions: _Map, name: str) -> None:
        self._regions = regions
        self._name = name

    def cut(self) -> None:
        self._regions.change(self._name, cut=True)

    def mend(self) -> None:
        self._regions.change(self._name, cut=False)

    def reshape(self, shape: LinkShape) -> None:
        region = _region(shape)
        self._regions.change(self._name, rate_mbit=region.rate_mbit, delay_ms=region.delay_ms)


def _region(shape: LinkShape) -> Region:
    rate_mbit = None if shape.rate_mbit == float("inf") else shape.rate_mbit
    return Region(rate_mbit=rate_mbit, delay_ms=shape.delay_s * 1000)


def _sweep() -> None:
    """Removes what is left of runs that were ended by kill -9: nothing of them runs any more."""
    for project, held in projects_at_rest(HELD_LABEL).items():
        if not _is_held(Path(held)):
            # It is not ours, and the next run tries again.
            with contextlib.suppress(DilocoError):
                remove(project)


def _is_held(path: Path) -> bool:
    """By a run that just begins, or ends; a file that is not here, or cannot be read, may be
    anybody's.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
