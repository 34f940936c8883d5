"""`diloco admin stop`: ends the server."""

from __future__ import annotations

from cli.admin import CODES, FROM, ReasonedSettings, client, show
from cli.verb import Verb


class AdminStopSettings(ReasonedSettings):
    """Why."""


def run(settings: AdminStopSettings) -> None:
    """Has the server end.

    Raises:
        SettingsError: when it cannot be done.
        ForbiddenError, UnreachableError: when the server does not take it, or does not answer.
    """
    show(client(settings).stop(settings.reason), settings)


VERB = Verb(
    name="admin stop",
    summary="write a last snapshot and end the server",
    details=(
        "Stop the server, as Ctrl-C or SIGTERM does: it parks open rounds, writes a last\n"
        "snapshot and ends with exit code 0. This returns before that. Learners train on, and\n"
        "come back when it does.\n"
        "\n" + FROM
    ),
    examples=("examples:\n  diloco admin stop --reason 'new kernel'" + CODES),
    settings=AdminStopSettings,
    run=run,
)
