"""`diloco evaluate`: held-out losses of a run's global weights."""

from __future__ import annotations

import threading

from pydantic import Field

from cli.process import MemberSettings
from cli.stop import Unbegun, stop_on_signal
from cli.verb import Verb


class EvaluateSettings(MemberSettings):
    """Which run to follow, and how often to evaluate it."""

    name: str = Field(
        default="evaluator",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="the evaluator's name, unique within the run",
    )
    every_s: float = Field(
        default=2.0, gt=0, description="least seconds from one evaluation to the next"
    )


def run(settings: EvaluateSettings) -> None:
    """Evaluates until the run is finished or SIGINT or SIGTERM.

    Raises:
        UnreachableError: when the server is not reached within `patience_s`.
        RefusedError: when it will not have this evaluator.
        SettingsError, DataError: when the run's program cannot be built here.
    """
    # Never set: an evaluator has nothing to keep at any time, and need not end what it computes.
    unbegun = Unbegun(threading.Event(), f"{settings.name}: stopped before its evaluation was done")
    with stop_on_signal(exit_with_parent=settings.exit_with_parent, unbegun=unbegun) as stop:
        import structlog

        from cli.member import joined

        structlog.contextvars.bind_contextvars(evaluator=settings.name)
        with joined(settings) as member:
            if member is None:
                return
            from learner.evaluate import Evaluator

            evaluator = Evaluator(
                settings.name,
                member.program,
                member.link,
                member.description,
                settings.every_s,
            )
            member.show_state("evaluating")
            newest = evaluator.run(stop)
    if newest is None:
        print(f"{settings.name}: stopped before the first evaluation")
    else:
        print(f"{settings.name}: {newest.loss:.4f} {newest.unit} at step {newest.global_step}")


VERB = Verb(
    name="evaluate",
    summary="report the held-out loss of a run's global weights",
    details=(
        "Report the held-out loss of a run's global weights: join the server, pull new versions,\n"
        "evaluate them on the held-out part of the data, and report the loss to the server, where\n"
        "`diloco status` shows it. Ends by itself when the run is finished. Trains nothing."
    ),
    examples=(
        "examples:\n"
        "  diloco evaluate --address 127.0.0.1:7700\n"
        "  diloco evaluate --every-s 30\n\n"
        "exit codes: 2 settings or data, 3 nobody answers at the address, 4 refused"
    ),
    settings=EvaluateSettings,
    run=run,
)
