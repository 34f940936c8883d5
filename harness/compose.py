"""The compose file of a run in containers: its processes, and the links between its regions. Pure.

JSON is YAML, so the file is what `json` writes; Compose 1.29 and v2 take it. All containers see
`out`, and nothing else of this machine but the data, under the path that it has here; they run as
whoever started the run, and share the process ids of the container `wan`: so ids differ from one
process of the run to the next, and with `wan` all of them end.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fragments.errors import SettingsError
from harness.environment import few_threads
from harness.plan import SERVER
from harness.processes import Command

WAN = "wan"
"""The service that stands for the network between regions, and what a learner dials."""

HELD_LABEL = "diloco.held"
"""On each container: the file that is locked for as long as somebody wants it."""

CONTROL, BULK = 7700, 7701
"""The server's ports, in its container."""

_DATA = Path("/data")
"""Where a container has the data."""


@dataclass(frozen=True, slots=True)
class Mounted:
    """Data of this machine in a container: `source`, a directory, at /data; `pattern` is what
    `--data` is there.
    """

    source: Path
    pattern: str

    @staticmethod
    def of(data: str) -> Mounted:
        """A file, a directory or a glob of this machine."""
        parts = Path(data).absolute().parts
        plain = next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        source = Path(*parts[:plain])
        if not source.is_dir():
            source, plain = source.parent, plain - 1
        return Mounted(source, str(_DATA.joinpath(*parts[plain:])))


@dataclass(frozen=True, slots=True)
class Project:
    """A compose project. `user`: its processes' ids of user and group. `port`: of this machine's
    loopback, where the server is reached. `links`: where `harness.wan` finds its map and more.
    """

    name: str
    image: str
    out: Path
    user: tuple[int, int]
    port: int
    links: Path
    data: Mounted | None = None

    def container(self, service: str) -> str:
        """Its name."""
        return f"{self.name}-{service}"

    def environ(self, every_core: bool) -> dict[str, str]:
        """Of a process: caches are where it may write."""
        caches = self.out / "cache"
        environ = {
            "HOME": "/tmp",
            "JAX_COMPILATION_CACHE_DIR": str(caches / "own"),
            "NUMBA_CACHE_DIR": str(caches / "numba"),
        }
        return environ if every_core else few_threads(environ)

    def file(self, commands: Sequence[Command]) -> dict[str, Any]:
        """The whole of it, with a service for each command, by its name.

        Raises:
            SettingsError: for two of one name.
        """
        services = {WAN: self._wan()}
        for command in commands:
            if command.name in services:
                raise SettingsError(
                    f"a learner cannot be called {command.name}: another container of the run is"
                )
            services[command.name] = self._service(command.argv, command.environ, command.name)
        for name in services.keys() - {WAN}:
            services[name]["pid"] = f"service:{WAN}"
        services[SERVER]["ports"] = [f"127.0.0.1:{self.port}:{CONTROL}"]
        return {"services": services, "networks": {WAN: {}}}

    def _wan(self) -> dict[str, Any]:
        targets = [f"{SERVER}:{CONTROL}", f"{SERVER}:{BULK}"]
        files = ["--carried", str(self.carried), "--while-held", str(self.held)]
        argv = ("python3", "-P", "-m", "harness.wan", str(self.map), *targets, *files)
        # Regions are found by name on their own network. One that is away is nowhere else either,
        # and asking the world for it takes seconds.
        return {**self._service(argv, {}, WAN), "dns": ["127.0.0.1"], "dns_search": ["."]}

    def _service(
        self, argv: Sequence[str], environ: Mapping[str, str], name: str
    ) -> dict[str, Any]:
        volumes = [_bind(self.out, self.out)]
        if self.data is not None:
            volumes.append({**_bind(self.data.source, _DATA), "read_only": True})
        return {
            "image": self.image,
            "container_name": self.container(name),
            # Whatever Python started the run, the image has its own.
            "entrypoint": ["python3"],
            "command": [_plain(word) for word in argv[1:]],
            "environment": {name: _plain(value) for name, value in environ.items()},
            "labels": {HELD_LABEL: _plain(str(self.held))},
            "user": ":".join(map(str, self.user)),
            "networks": [WAN],
            "volumes": volumes,
            "healthcheck": {"disable": True},
            # Who has died is started again by the run, and by it alone.
            "restart": "no",
        }

    @property
    def map(self) -> Path:
        """Of the regions, as it is at the moment."""
        return self.links / "map.toml"

    @property
    def carried(self) -> Path:
        """What links have carried."""
        return self.links / "carried.json"

    @property
    def held(self) -> Path:
        """Locked for as long as the run's containers are wanted."""
        return self.links / "held"


def _bind(source: Path, target: Path) -> dict[str, Any]:
    return {"type": "bind", "source": _plain(str(source)), "target": _plain(str(target))}


def _plain(text: str) -> str:
    """Compose puts variables in where it sees a dollar."""
    return text.replace("$", "$$")
