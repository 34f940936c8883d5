"""`diloco admin rollback`: goes back to a snapshot."""

from __future__ import annotations

from pydantic import Field

from cli.admin import CODES, FROM, ReasonedSettings, client, show
from cli.verb import Verb
from fragments.errors import SettingsError


class AdminRollbackSettings(ReasonedSettings):
    """Where to go back to."""

    to: str = Field(default="", max_length=32, description="name of a snapshot, such as 000012")
    to_version: int | None = Field(
        default=None,
        ge=0,
        lt=1 << 63,
        description="instead: the newest snapshot whose fragments are all at this version or below",
    )


def run(settings: AdminRollbackSettings) -> None:
    """Goes back to a snapshot.

    Raises:
        SettingsError: when it cannot be done.
        ForbiddenError, UnreachableError: when the server does not take it, or does not answer.
    """
    if settings.to and settings.to_version is not None:
        raise SettingsError("--to and --to-version both name a snapshot: give one of them")
    answered = client(settings).roll_back(settings.reason, settings.to, settings.to_version)
    show(answered, settings)


VERB = Verb(
    name="admin rollback",
    summary="go back to an older snapshot, in a new epoch",
    details=(
        "Go back to the values of a snapshot, its outer state included, in a new epoch: without\n"
        "--to and --to-version, to the newest. What was merged since is void, what was trained\n"
        "since does not count, and the data goes on where it was. All leases end; learners that\n"
        "are there join again by themselves, and give up what they trained for the full values.\n"
        "Settings, evictions and a drain stay. A name that is not there is answered with those\n"
        "that are.\n"
        "\n" + FROM
    ),
    examples=(
        "examples:\n"
        "  diloco admin drain && diloco admin rollback --to 000012 --reason 'loss spike'\n"
        "  diloco admin rollback --to-version 40" + CODES
    ),
    settings=AdminRollbackSettings,
    run=run,
)
