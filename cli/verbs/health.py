"""`diloco health`: one question to a process, for whatever looks after it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cli.keys import Positional, VerbSettings
from cli.verb import Verb
from fragments.errors import DilocoError


class HealthSettings(VerbSettings):
    """Whom to ask, and how long to wait."""

    target: Annotated[str, Positional] = Field(
        default="127.0.0.1:7700",
        description="HOST:PORT of an outer server, or of the admin port of another process",
    )
    timeout_s: float = Field(default=5.0, gt=0, description="seconds to wait for the answer")


def run(settings: HealthSettings) -> None:
    """Prints SERVING.

    Raises:
        UnreachableError: when nobody answers.
        DilocoError: when the process says that it is not serving.
    """
    from services.probe import is_serving

    if not is_serving(settings.target, settings.timeout_s):
        raise DilocoError(f"{settings.target} is not serving: it is starting, stopping or at fault")
    print("SERVING")


VERB = Verb(
    name="health",
    summary="ask a server, learner or evaluator whether it is well",
    details=(
        "Ask a server, learner or evaluator, by the standard gRPC health service, whether it is\n"
        "well, and tell by the exit code: what an orchestrator's health check needs. A server is\n"
        "well while it takes calls; a learner while it trains, an evaluator while it evaluates.\n\n"
        "DILOCO_ADDRESS is not looked at: there it says whom a learner dials, and whoever looks\n"
        "after a process, in its container for one, asks that process itself."
    ),
    examples=(
        "examples:\n"
        "  diloco health                      # the outer server on this machine\n"
        "  diloco health 127.0.0.1:7710       # a learner with --admin-port 7710\n\n"
        "exit codes: 0 serving, 1 not serving, 3 nobody answers"
    ),
    settings=HealthSettings,
    run=run,
)
