"""`diloco events`: what has happened in a run, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from cli.keys import Positional, VerbSettings
from cli.verb import Verb
from fragments.errors import RunDirectoryError, SettingsError

if TYPE_CHECKING:
    from outer_server.history import Hole


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
        SettingsError: when nobody of that name is on the tape.
        RunDirectoryError: when there is no tape, or it is damaged, after what could be read.
    """
    from harness import chronicle
    from harness.terminal import say
    from outer_server.history import data_account

    if settings.data:
        found = data_account(settings.run_dir)
        for line in chronicle.account_lines(found, as_json=settings.json_):
            say(line)
        return
    holes: list[Hole] = []
    told = _told(settings, holes)
    lines: Iterable[str] = deque(told, settings.last) if settings.last else told
    for line in lines:
        say(line)
    damage = [hole for hole in holes if not (hole.is_lost and hole.is_covered)]
    if damage:
        sentences = "; ".join(map(str, damage))
        raise RunDirectoryError(f"of {settings.run_dir}, {sentences}: {damage[-1].meaning}")


def _told(settings: EventsSettings, holes: list[Hole]) -> Iterator[str]:
    """What is to be printed; `holes` is added to. Raises as `run`."""
    from harness import chronicle
    from outer_server.history import events

    new: list[Hole] = []
    learner, known = settings.learner, set[str]()
    for happened in events(settings.run_dir, new.append):
        yield from _holes(new, holes, settings)
        about = chronicle.names(happened)
        if learner:
            known |= about | set(happened.state.learners)
        if learner and learner not in about:
            continue
        if settings.json_:
            yield chronicle.as_json(happened)
            continue
        for sentence in chronicle.sentences(happened, every=settings.every):
            yield f"{chronicle.when(happened)}  {sentence}"
    yield from _holes(new, holes, settings)
    if learner and learner not in known:
        here = f"there are {', '.join(sorted(known))}" if known else "nobody has joined yet"
        raise SettingsError(f"--learner {learner}: there is no such learner here: {here}")


def _holes(new: list[Hole], holes: list[Hole], settings: EventsSettings) -> Iterator[str]:
    """Those that were met just now, each told once, in its place."""
    for hole in new:
        holes.append(hole)
        if not settings.json_:
            yield f"[{hole}]"
    new.clear()


VERB = Verb(
    name="events",
    summary="what has happened in a run: joins, contributions, versions, losses, with reasons",
    details=(
        "Print what stands in a run's journal, from the oldest snapshot that is kept: who joined\n"
        "and left and why, what each learner sent, which round was closed with whom, and which\n"
        "version came of it. The run may be served meanwhile, and nothing of it is changed.\n\n"
        "--data tells of the batches of training data instead. Each shard of the data is counted\n"
        "for each fragment: which batches came into it, and why others did not:\n"
        "  overlap      trained while a newer version was on its way, which then took their\n"
        "               place, or before anybody asked: the price of never waiting, no fault\n"
        "  refused      the server did not take them (too old), or could not merge them\n"
        "  crash        their process ended before it had sent them\n"
        "  unsent       nobody has asked for them yet\n"
        "  waiting      taken, and not merged yet; left over: and the run ended before that\n"
        "  rolled back  the run went back to a snapshot of before them\n"
        "No batch comes into a fragment twice: `counted twice` must say 0."
    ),
    examples=(
        "examples:\n"
        "  diloco events runs/mine\n"
        "  diloco events runs/mine --learner us-east --last 20\n"
        "  diloco events runs/mine --data\n"
        "  diloco events runs/mine --json --every | jq 'select(.event == \"Merged\")'\n\n"
        "exit codes: 2 no such learner, 5 no journal there, or it is damaged"
    ),
    settings=EventsSettings,
    run=run,
)
