"""`diloco events`: what has happened in a run, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from cli.keys import Positional, VerbSettings
from cli.verb import Verb

if TYPE_CHECKING:
    from outer_server.history import Happened


class EventsSettings(VerbSettings):
    """Which run, and what of it."""

    run_dir: Annotated[Path, Positional] = Field(description="directory that `diloco init` made")
    json_: bool = Field(default=False, alias="json", description="one JSON object an event")
    every: bool = Field(default=False, description="reports, adoptions and declined asks too")
    learner: str = Field(default="", description="only what this learner has to do with")
    data: bool = Field(
        default=False,
        description="instead, the account of the training data: batches merged, each once, and why"
        " the others were not",
    )
    last: int = Field(default=0, ge=0, description="only the newest so many; 0 for all")


def run(settings: EventsSettings) -> None:
    """Prints the events.

    Raises:
        RunDirectoryError: when there is no tape, or it is damaged, after what could be read.
    """
    from harness import chronicle
    from harness.terminal import say
    from outer_server.history import data_account, events

    if settings.data:
        found = data_account(settings.run_dir)
        for line in chronicle.account_lines(found, as_json=settings.json_):
            say(line)
        return

    def told() -> Iterator[str]:
        for happened in _about(events(settings.run_dir), settings.learner):
            if settings.json_:
                yield chronicle.as_json(happened)
                continue
            for sentence in chronicle.sentences(happened, every=settings.every):
                yield f"{chronicle.when(happened)}  {sentence}"

    lines: Iterable[str] = deque(told(), settings.last) if settings.last else told()
    for line in lines:
        say(line)


def _about(happened: Iterable[Happened], learner: str) -> Iterator[Happened]:
    from harness.chronicle import names

    return (each for each in happened if not learner or learner in names(each))


VERB = Verb(
    name="events",
    summary="what has happened in a run: joins, contributions, versions, losses, with reasons",
    details=(
        "Print what stands in a run's journal, from the oldest snapshot that is kept: who joined\n"
        "and left and why, what each learner sent, which round was closed with whom, and which\n"
        "version came of it. The run may be served meanwhile."
    ),
    examples=(
        "examples:\n"
        "  diloco events runs/mine\n"
        "  diloco events runs/mine --learner us-east --last 20\n"
        "  diloco events runs/mine --data\n"
        "  diloco events runs/mine --json --every | jq 'select(.event == \"Merged\")'\n\n"
        "exit code 5: no journal there, or it is damaged"
    ),
    settings=EventsSettings,
    run=run,
)
