"""`diloco admin drain`: no more rounds, until it is released."""

from __future__ import annotations

from cli.admin import CODES, FROM, ReasonedSettings, client, show
from cli.verb import Verb


class AdminDrainSettings(ReasonedSettings):
    """Why."""


def run(settings: AdminDrainSettings) -> None:
    """Drains the run.

    Raises:
        SettingsError: when it cannot be done.
        ForbiddenError, UnreachableError: when the server does not take it, or does not answer.
    """
    show(client(settings).drain(settings.reason), settings)


VERB = Verb(
    name="admin drain",
    summary="open no more rounds until `admin release`",
    details=(
        "Open no more rounds. Those that are open end by their rules; those that lack answers\n"
        "stay open. Learners train on and keep what they train, new ones may join, and all can\n"
        "pull. The status says draining, and health NOT_SERVING, until `diloco admin release`;\n"
        "a restart of the server keeps it so.\n"
        "\n" + FROM
    ),
    examples=(
        "examples:\n  diloco admin drain --reason 'moving the disk'\n  diloco admin release" + CODES
    ),
    settings=AdminDrainSettings,
    run=run,
)
