"""What `learn` and `evaluate` have in common: link, program and health of a process that joins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from cli.process import MemberSettings
from fragments.errors import SettingsError, UnreachableError
from fragments.records import Phase, RunDescription
from fragments.runspec import RunSpec
from harness.memory import keep_trim
from harness.programs import load_program
from learner.program import Program
from services.client.outer import GrpcLink
from services.health import AdminHealth

_log = structlog.get_logger(__name__)

AGAIN_S = 1.0
"""From one attempt to reach a server that is not there yet, of several tries, to the next."""

_WELL = frozenset({"training", "evaluating"})


@dataclass(frozen=True, slots=True)
class Member:
    """A process about to join."""

    link: GrpcLink
    description: RunDescription
    program: Program
    health: AdminHealth

    def show_state(self, state: str) -> None:
        """Logs a change of state; the health service says SERVING while it trains."""
        self.health.serving = state in _WELL
        _log.info("state", state=state)


@contextmanager
def joined(settings: MemberSettings, cap_up_mbit: float | None = None) -> Iterator[Member | None]:
    """Reaches the server, builds the run's program, and closes everything at the end.

    Yields None, after saying so on stdout, for a run that is finished: nothing is built then.

    Raises:
        UnreachableError: when nobody answers at the address for as long as is tried.
        SettingsError, DataError: when the run's program cannot be built here, or from other data
            than the run's without `other_data`.
    """
    health = AdminHealth(settings.admin_port)
    link = GrpcLink(
        settings.address,
        settings=settings.link,
        cap_up_mbit=cap_up_mbit,
        cap_down_mbit=settings.cap_down_mbit,
    )
    try:
        description = _described(link, settings.patience_s)
        structlog.contextvars.bind_contextvars(run=description.run_id)
        _log.info("health", address=str(health.address))
        if description.phase is Phase.FINISHED:
            print(
                f"run {description.run_id} is finished already: nothing to do"
                f" (diloco status --address {settings.address} shows how it ended)"
            )
            yield None
            return
        spec = RunSpec.model_validate_json(description.run_spec_json)
        keep_trim()
        program = load_program(spec, settings.data)
        if not settings.other_data:
            _check_data(spec, program)
        yield Member(link, description, program, health)
    finally:
        link.close()
        health.stop()


def _described(link: GrpcLink, patience_s: float) -> RunDescription:
    """What is trained there, once somebody answers. Raises UnreachableError after `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return link.describe()
        except UnreachableError as error:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise
            _log.warning("server_away", reason=str(error), tries_for_s=round(left_s))
            time.sleep(min(AGAIN_S, left_s))


def _check_data(spec: RunSpec, program: Program) -> None:
    """Raises SettingsError where both the run and the program tell their data, and differ."""
    own = str(getattr(program, "data_digest", ""))
    if own and spec.program.data_digest and own != spec.program.data_digest:
        raise SettingsError(
            f"the data here (digest {own[:16]}) is not the run's"
            f" (digest {spec.program.data_digest[:16]}): give every process the same files as"
            " `diloco init` had (without --data, the same Python release), or --other-data to use"
            " other text on purpose"
        )
