"""`diloco status`: one look at a run, or a picture that follows it."""

from __future__ import annotations

from pydantic import Field

from cli.keys import VerbSettings
from cli.verb import Verb


class StatusSettings(VerbSettings):
    """Whom to ask and how to show the answer."""

    address: str = Field(default="127.0.0.1:7700", description="HOST:PORT of the outer server")
    json_: bool = Field(
        default=False, alias="json", description="print JSON; with --watch one line each"
    )
    watch: bool = Field(default=False, description="follow the run until it ends or Ctrl-C")
    interval_s: float = Field(
        default=1.0, ge=0.1, description="seconds between two looks with --watch"
    )


def run(settings: StatusSettings) -> None:
    """Prints the status once, or again and again.

    Raises:
        UnreachableError: when nobody answers there.
    """
    from harness.status import show_status, watch_run

    if not settings.watch:
        show_status(settings.address, as_json=settings.json_)
        return
    from cli.stop import stop_on_signal

    with stop_on_signal() as stop:
        watch_run(settings.address, settings.interval_s, stop, as_json=settings.json_)


VERB = Verb(
    name="status",
    summary="show a run: step, loss, fragments, learners, bytes",
    details=(
        "Show a run at a glance: its step and tokens, the held-out loss, the version of every\n"
        "fragment, and for every learner its state, how far behind it is, and its bytes. Bytes\n"
        "are those since the server's start. The run's step is where its clock stands (that of\n"
        "the K-th fastest learner, K the quorum); a learner's steps are all that its processes\n"
        "have made, also what came of no use because they were lost."
    ),
    examples=(
        "examples:\n"
        "  diloco status --address 127.0.0.1:7700\n"
        "  diloco status --watch\n"
        "  diloco status --json | jq .learners\n\n"
        "exit code 3: nobody answers at the address"
    ),
    settings=StatusSettings,
    run=run,
)
