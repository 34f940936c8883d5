"""`diloco admin evict`: ends the lease of a name, and grants it no other."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cli.admin import CODES, FROM, ReasonedSettings, client, show
from cli.keys import Positional
from cli.verb import Verb


class AdminEvictSettings(ReasonedSettings):
    """Whom, for how long, and what becomes of what it has sent."""

    learner: Annotated[str, Positional] = Field(description="name of a learner or an evaluator")
    for_s: float | None = Field(
        default=None, gt=0, description="released by itself after so many seconds"
    )
    drop: bool = Field(
        default=False, description="drop what it has sent and no round has taken yet"
    )


def run(settings: AdminEvictSettings) -> None:
    """Evicts a name.

    Raises:
        SettingsError: when it cannot be done.
        ForbiddenError, UnreachableError: when the server does not take it, or does not answer.
    """
    answered = client(settings).evict(
        settings.learner, settings.reason, settings.for_s, drop=settings.drop
    )
    show(answered, settings)


VERB = Verb(
    name="admin evict",
    summary="end the lease of a name and refuse it",
    details=(
        "End the lease of a learner or evaluator and refuse its name, until `diloco admin\n"
        "release NAME` or for a time, which a restart of the server begins anew. Its process is\n"
        "told why: it trains on for itself and asks again every few seconds; one that is\n"
        "started meanwhile ends with exit code 4. What it has sent and was acknowledged is\n"
        "merged with the next rounds, or dropped with --drop; what it has not sent by then\n"
        "waits with it.\n"
        "\n" + FROM
    ),
    examples=(
        "examples:\n"
        "  diloco admin evict eu-west --reason 'bad data'\n"
        "  diloco admin evict eu-west --for-s 600 --drop" + CODES
    ),
    settings=AdminEvictSettings,
    run=run,
)
