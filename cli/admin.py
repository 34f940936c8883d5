"""What the verbs of `diloco admin` share: whom they ask, why, and how the answer is shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import Field

from cli.keys import VerbSettings

if TYPE_CHECKING:
    from fragments.records import Answered
    from services.client.admin import AdminClient

FROM = (
    "The server takes this from its own machine only, unless it was started with --admin-from.\n"
    "What it answers is durable. Asking again changes nothing more."
)
"""What --help of each says."""

CODES = (
    "\n\nexit codes: 2 it cannot be done, 3 nobody answers at the address, 4 not from this machine"
)


class AdminSettings(VerbSettings):
    """Whom to ask."""

    address: str = Field(default="127.0.0.1:7700", description="HOST:PORT of the outer server")
    json_: bool = Field(default=False, alias="json", description="print the answer as JSON")


class ReasonedSettings(AdminSettings):
    """And why."""

    reason: str = Field(
        default="", max_length=128, description="why, for the status and the log of the server"
    )


def client(settings: AdminSettings) -> AdminClient:
    """The one that asks. Raises SettingsError for a malformed address."""
    from services.client.admin import AdminClient

    return AdminClient(settings.address)


def show(answered: Answered, settings: AdminSettings) -> None:
    """Prints the answer."""
    if settings.json_:
        fields = ("sentence", "changed", "snapshot")
        print(json.dumps({name: getattr(answered, name) for name in fields}))
    else:
        print(answered.sentence if answered.changed else f"nothing to do: {answered.sentence}")
