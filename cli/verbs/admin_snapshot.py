"""`diloco admin snapshot`: writes a snapshot now."""

from __future__ import annotations

from cli.admin import CODES, FROM, AdminSettings, client, show
from cli.verb import Verb


class AdminSnapshotSettings(AdminSettings):
    """Whom to ask."""


def run(settings: AdminSnapshotSettings) -> None:
    """Has a snapshot written and waits until it is durable.

    Raises:
        SettingsError: when it cannot be done.
        ForbiddenError, UnreachableError: when the server does not take it, or does not answer.
    """
    show(client(settings).snapshot(), settings)


VERB = Verb(
    name="admin snapshot",
    summary="write a snapshot now",
    details=(
        "Write a snapshot now, and say its name once it is durable. Like those that the server\n"
        "writes by itself, it is removed when three newer ones are there.\n"
        "\n" + FROM
    ),
    examples=(
        "examples:\n"
        "  diloco admin snapshot\n"
        "  diloco admin snapshot --json | jq -r .snapshot" + CODES
    ),
    settings=AdminSnapshotSettings,
    run=run,
)
