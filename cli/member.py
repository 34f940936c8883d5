"""What `learn` and `evaluate` have in common: link, program and health of a process that joins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from cli.process import MemberSettings
from fragments.records import RunDescription
from fragments.runspec import RunSpec
from harness.programs import load_program
from learner.program import Program
from services.client.outer import GrpcLink
from services.health import AdminHealth

_log = structlog.get_logger(__name__)

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
def joined(settings: MemberSettings) -> Iterator[Member]:
    """Reaches the server, builds the run's program, and closes everything at the end.

    Raises:
        UnreachableError: when nobody answers at the address.
        SettingsError, DataError: when the run's program cannot be built here.
    """
    health = AdminHealth(settings.admin_port)
    link = GrpcLink(settings.address, settings=settings.link)
    try:
        description = link.describe()
        structlog.contextvars.bind_contextvars(run=description.run_id)
        _log.info("health", address=str(health.address))
        spec = RunSpec.model_validate_json(description.run_spec_json)
        yield Member(link, description, load_program(spec, settings.data), health)
    finally:
        link.close()
        health.stop()
