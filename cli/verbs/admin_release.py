"""`diloco admin release`: undoes `drain`, or `evict` of a name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cli.admin import CODES, FROM, ReasonedSettings, client, show
from cli.keys import Positional
from cli.verb import Verb


class AdminReleaseSettings(ReasonedSettings):
    """Whom to let in again."""

    learner: Annotated[str | None, Positional] = Field(
        default=None, description="an evicted name; without it, rounds open again after a drain"
    )


def run(settings: AdminReleaseSettings) -> None:
    """Releases the run or a name.

    Raises:
        SettingsError: when it cannot be done.
        ForbiddenError, UnreachableError: when the server does not take it, or does not answer.
    """
    show(client(settings).release(settings.learner, settings.reason), settings)


VERB = Verb(
    name="admin release",
    summary="undo `admin drain`, or `admin evict` of a name",
    details=(
        "Undo `diloco admin drain`: rounds open again. With a name, undo `diloco admin evict`:\n"
        "it may join again. A process of that name that is still there does so by itself within\n"
        "seconds, with what it holds; what is too old by then it fetches anew.\n"
        "\n" + FROM
    ),
    examples=("examples:\n  diloco admin release\n  diloco admin release eu-west" + CODES),
    settings=AdminReleaseSettings,
    run=run,
)
