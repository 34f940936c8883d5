"""What the settings of every process of a run have in common."""

from __future__ import annotations

from pydantic import Field

from cli.keys import VerbSettings
from services.settings import CapMbit, ClientSettings


class ProcessSettings(VerbSettings):
    """A process that runs until it is done or told to stop."""

    exit_with_parent: bool = Field(
        default=False,
        description="stop when stdin ends: for whoever starts this process and may die",
    )


class MemberSettings(ProcessSettings):
    """A process that joins a run."""

    address: str = Field(default="127.0.0.1:7700", description="HOST:PORT of the outer server")
    data: str | None = Field(
        default=None,
        min_length=1,
        description="text or JSONL files here, the same as everywhere else in the run: a file, a"
        " directory with all below it, or a glob; without it, the source of Python's standard"
        " library",
    )
    other_data: bool = Field(
        default=False,
        description="use data that is not what the run was made with, which is otherwise refused",
    )
    admin_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="loopback port of this process's own health service; 0 for any free one",
    )
    cap_down_mbit: CapMbit = Field(
        default=None,
        description="most Mbit/s of weights that this process pulls down from the server",
    )
    patience_s: float = Field(
        default=600.0,
        ge=0,
        description="how long this process tries to reach a server that is not there when it"
        " starts, seconds; 0 tells at once that nobody answers",
    )
    link: ClientSettings = ClientSettings()
