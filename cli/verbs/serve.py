"""`diloco serve`: the outer server of one run."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from cli.farewell import Farewell
from cli.keys import Positional
from cli.process import ProcessSettings
from cli.stop import stop_on_signal
from cli.verb import Verb
from fragments.errors import DilocoError, RunDirectoryError, SettingsError
from services.settings import ServerSettings

if TYPE_CHECKING:
    from fragments.records import RunStatus
    from outer_server.server import OuterServer
    from services.outer.server import OuterServices

STOP_WITHIN_S = 60.0
"""Of a server: the last snapshot of a small model is written in a moment, of a big one it is not,
and ending before it is there would lose what was acknowledged since the one before."""

LOOK_S = 0.5
"""How often the server is looked after."""


class ServeSettings(ProcessSettings, ServerSettings):
    """Which run to serve, where, and within what bounds."""

    run_dir: Annotated[Path, Positional] = Field(description="directory that `diloco init` made")
    journal: bool = Field(
        default=True,
        description="acknowledge and publish only what a crash or power cut cannot take back;"
        " without it such a stop goes back to the newest snapshot",
    )
    take_over: bool = Field(
        default=False,
        description="go on with a copy of a run directory whose original is served no more",
    )
    until_finished: bool = Field(
        default=False,
        description="end once the run is finished and everybody has left, instead of serving its"
        " last weights on",
    )
    keep_snapshots: int = Field(
        default=3,
        ge=1,
        description="snapshots that are kept; the journal reaches back to the oldest of them",
    )


def run(settings: ServeSettings) -> None:
    """Serves until SIGINT or SIGTERM, or the run's end if so told; then saves a last snapshot.

    Raises:
        SettingsError: for an address that may not or cannot be had.
        RunDirectoryError: when the directory is missing, damaged, or another server has it.
    """
    from harness.environment import use_server_arithmetic
    from harness.memory import keep_trim, settle
    from outer_server.store.lock import ADDRESS, check_unused
    from services.security import check_bind

    host, port = check_bind(settings.address, settings.insecure)
    _check_directory(settings.run_dir)
    # Before the port: whoever serves this run mostly has that too.
    check_unused(settings.run_dir)
    # Before the run is loaded, which takes seconds, and in words that name the setting. Who takes
    # a port between this look and the real binding is found out there.
    _check_free(host, port, f"--address {settings.address}")
    _check_free(host, settings.bulk_port, f"--bulk-port {settings.bulk_port}")
    use_server_arithmetic(os.environ)
    keep_trim()
    with stop_on_signal(exit_with_parent=settings.exit_with_parent, within_s=STOP_WITHIN_S) as stop:
        from outer_server.server import OuterServer
        from services.outer.server import OuterServices

        server_settings = ServerSettings.model_validate(
            {name: getattr(settings, name) for name in ServerSettings.model_fields}
        )
        with OuterServer(
            settings.run_dir,
            keep_journal=settings.journal,
            take_over=settings.take_over,
            keep_snapshots=settings.keep_snapshots,
        ) as outer:
            services = OuterServices(outer, server_settings, outer.admin)
            services.start()
            settle()
            try:
                _announce(settings.run_dir, services, outer.describe().run_id)
                _attend(outer, services, stop, until_finished=settings.until_finished)
            finally:
                (settings.run_dir / ADDRESS).unlink(missing_ok=True)
                services.stop()
    print(f"stopped; the state is in {settings.run_dir}")


def _attend(
    outer: OuterServer, services: OuterServices, stop: threading.Event, *, until_finished: bool
) -> None:
    """Until `stop` is set, an operator says so, or the run is over and nobody is there any more.

    Raises:
        DilocoError: when the server has failed.
    """
    from fragments.records import Phase

    farewell = Farewell()
    told = False
    while not stop.wait(LOOK_S) and not outer.admin.stop_reason:
        if outer.failed:
            raise DilocoError("the server has failed: its log above says why")
        status = outer.status()
        finished = status.phase is Phase.FINISHED
        if finished and not told:
            print(_result(status), flush=True)
            told = True
        if until_finished and farewell.is_over(
            time.monotonic(),
            finished=finished,
            open_streams=services.open_streams,
            visits=services.visits,
        ):
            return


def _result(status: RunStatus) -> str:
    """What came of a run, in a line; its last weights may not be evaluated yet."""
    last = status.evaluations[-1] if status.evaluations else None
    loss = ""
    if last is not None:
        loss = f"; held-out loss at step {last.global_step}, the newest so far: {last.loss:.4f}"
        loss += f" {last.unit}"
    return (
        f"run {status.run_id} is finished at step {status.global_step}:"
        f" {status.tokens_trained:,} tokens trained{loss}"
    )


def _check_directory(run_dir: Path) -> None:
    """Raises RunDirectoryError, with the right path, for the directory above a run."""
    inner = run_dir / "run"
    if (inner / "run.json").is_file() and not (run_dir / "run.json").exists():
        raise RunDirectoryError(
            f"{run_dir} is not a run directory, but {inner} is: diloco serve {inner}"
        )


def _check_free(host: str, port: int, setting: str) -> None:
    """Raises SettingsError, naming `setting`, when nobody can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As gRPC does: a connection that has just ended keeps nobody from listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            flag = setting.partition(" ")[0]
            if error.errno == errno.EADDRINUSE:
                place = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
                raise SettingsError(
                    f"{setting}: {place} is in use: stop what listens there, or choose another"
                    f" port with {flag} (0 takes any free one)"
                ) from error
            raise SettingsError(
                f"{setting}: cannot listen there: {error.strerror or error}"
            ) from error


def _announce(run_dir: Path, services: OuterServices, run_id: str) -> None:
    """Says where the server listens, on stdout and in the run directory."""
    address = services.address
    if address.host in ("0.0.0.0", "::"):
        # Everywhere is no place to dial; what reads the file is on this machine.
        address = address._replace(host="127.0.0.1" if address.host == "0.0.0.0" else "::1")
    place = {
        "address": str(address),
        "bulk_port": services.ports.bulk,
        "pid": os.getpid(),
        "run_id": run_id,
    }
    from outer_server.store.lock import ADDRESS

    part = run_dir / f".{ADDRESS}.part"
    part.write_text(json.dumps(place) + "\n", encoding="utf-8")
    part.replace(run_dir / ADDRESS)
    print(f"serving run {run_id} at {services.address}, bulk on port {services.ports.bulk}")
    print(f"next: diloco learn --address {address} --name NAME", flush=True)


VERB = Verb(
    name="serve",
    summary="run the outer server of a run",
    details=(
        "Run the outer server of a run: it owns the global parameters and the outer optimizer,\n"
        "asks learners for what they have learned, merges it and publishes new versions. It runs\n"
        "until Ctrl-C or SIGTERM and goes on from its state when it is started again, also after\n"
        "a crash or a power cut: at the same versions, with every contribution that it had\n"
        "acknowledged. What it did stands in its journal: diloco events, diloco replay. With\n"
        "--until-finished it also ends by itself, half a minute after the last has left.\n\n"
        "Where it listens is printed and stands in RUN_DIR/address.json while it runs; with port\n"
        "0 any free port is taken.\n\n"
        "A cap holds what travels of weights and pseudo-gradients, with all learners together and\n"
        "over any 10 s, to so many Mbit/s (10^6 bits), in the direction as this machine sees it:\n"
        "learners push, it receives; they pull, it sends. Heartbeats and status do not count.\n\n"
        "`diloco admin` is taken from programs on this machine only, whoever runs them, and from\n"
        "what reaches it through a tunnel that ends here; --admin-from nowhere takes it from\n"
        "nobody, anywhere from all who can reach the server."
    ),
    examples=(
        "examples:\n"
        "  diloco serve runs/mine\n"
        "  diloco serve runs/mine --address 127.0.0.1:0 --bulk-port 0\n"
        "  diloco serve runs/mine --address 0.0.0.0:7700 --insecure\n"
        "  diloco serve runs/mine --cap-receive-mbit 100 --cap-send-mbit 200\n"
        "  diloco serve runs/copied --take-over\n\n"
        "exit codes: 2 settings (a port in use, an address that needs --insecure); 5 run\n"
        "directory (missing, damaged, in use, or one that cannot be written)"
    ),
    settings=ServeSettings,
    run=run,
)
