"""Where the processes of a run are: here on this machine, or in containers of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from harness.environment import child_environment
from harness.link import LinkShape, Steered
from harness.processes import Command, Supervisor
from harness.relays import Relays


def _own_environment(every_core: bool) -> dict[str, str]:
    return child_environment(every_core=every_core)


@dataclass(frozen=True, slots=True)
class Terms:
    """What the processes of a run are told of where they are.

    `server_host`, `server_ports`: where the server listens; control and bulk, 0 for any; beyond
    loopback it takes `--insecure` among `serve_flags`. `reached_at`: where this process reaches it,
    if not where it says that it listens. `is_tied`: their stdin is a pipe of whoever started them.
    `environ`: the environment of a process that has every core, or one.
    """

    server_host: str = "127.0.0.1"
    server_ports: tuple[int, int] = (0, 0)
    serve_flags: tuple[str, ...] = ()
    reached_at: str = ""
    is_tied: bool = True
    environ: Callable[[bool], dict[str, str]] = _own_environment


class Ground(Protocol):
    """A place to run on. A context manager: at its end nothing is left running of what was started
    there, and nothing else was touched.
    """

    @property
    def processes(self) -> Supervisor:
        """Starts, watches and ends the processes."""

    @property
    def terms(self) -> Terms:
        """What they are told."""

    @property
    def links(self) -> Mapping[str, Steered]:
        """By learner; none before `open`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def seen(self, data: str | None) -> str | None:
        """What `--data` must be there for what it is here."""

    def prepare(self, commands: Sequence[Command]) -> None:
        """Once, before anything is started: all that will be."""

    def open(self, address: str, bulk_port: int) -> None:
        """The server listens: have the links lead there."""

    def dialled(self, name: str, address: str) -> str:
        """What the member of that name dials, given the server's address."""

    def carried_bytes(self) -> dict[str, tuple[int, int]]:
        """What each link has carried so far, up (from the learner) and down."""


class ThisMachine:
    """A `Ground`: processes that talk over loopback, some of them over a link of their own.

    Args:
        shapes: of the learners' links, by name; who has none dials the server itself.
        server_ports: see `Terms`.
    """

    def __init__(
        self, shapes: Mapping[str, LinkShape], server_ports: tuple[int, int] = (0, 0)
    ) -> None:
        self.processes = Supervisor()
        self.terms = Terms(server_ports=server_ports)
        self._relays = Relays(shapes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._relays, self.processes:
            pass

    @property
    def links(self) -> Mapping[str, Steered]:
        """See `Ground`."""
        return self._relays.links

    def seen(self, data: str | None) -> str | None:
        """See `Ground`."""
        return data

    def prepare(self, commands: Sequence[Command]) -> None:
        """See `Ground`. Nothing is to be done."""

    def open(self, address: str, bulk_port: int) -> None:
        """See `Ground`; SettingsError as of `Relays.open`."""
        self._relays.open(address, bulk_port)

    def dialled(self, name: str, address: str) -> str:
        """See `Ground`."""
        return self._relays.dialled(name, address)

    def carried_bytes(self) -> dict[str, tuple[int, int]]:
        """See `Ground`."""
        return self._relays.carried_bytes()
