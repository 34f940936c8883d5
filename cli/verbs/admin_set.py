"""`diloco admin set`: changes settings of the run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cli.admin import CODES, FROM, ReasonedSettings, client, show
from cli.keys import Positional
from cli.verb import Verb
from fragments.errors import SettingsError


class AdminSetSettings(ReasonedSettings):
    """What to change."""

    changes: Annotated[tuple[str, ...], Positional] = Field(
        min_length=1, description="KEY=VALUE, as in `diloco init`: quorum=2, closing.rule=paper"
    )


def run(settings: AdminSetSettings) -> None:
    """Changes settings of the run, all or none.

    Raises:
        SettingsError: when it cannot be done.
        ForbiddenError, UnreachableError: when the server does not take it, or does not answer.
    """
    pairs = []
    for change in settings.changes:
        key, equals, value = change.partition("=")
        if not key.strip() or not equals:
            raise SettingsError(f"{change!r}: give KEY=VALUE, such as quorum=2")
        pairs.append((key.strip().replace("-", "_"), value.strip()))
    show(client(settings).change(pairs, settings.reason), settings)


VERB = Verb(
    name="admin set",
    summary="change settings of the run while it is trained",
    details=(
        "Change settings of the run while it is trained, all or none, checked as a whole:\n"
        "budget_tokens, sync_interval (from the next slot on), quorum, min_learners,\n"
        "max_open_rounds, staleness_bound, weight_bound, closing_lap, closing_lap_s, merge,\n"
        "asked, late, closing.*, outer.learning_rate, outer.momentum and outer.nesterov (from\n"
        "the next round that closes on). All others are fixed at the birth of the run; the\n"
        "answer says why. Learners hear at once of what concerns them. A budget below what is\n"
        "trained already is refused; budget_tokens=trained ends the run now.\n"
        "\n" + FROM
    ),
    examples=(
        "examples:\n"
        "  diloco admin set quorum=2 min_learners=2\n"
        "  diloco admin set sync_interval=0:8,0.25:48 --reason 'thin link'" + CODES
    ),
    settings=AdminSetSettings,
    run=run,
)
