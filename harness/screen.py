"""The live picture of a local run: in place on a terminal, else a line every few seconds."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fragments.records import RunStatus
from harness.cluster import COMPILER, INIT
from harness.processes import Event, EventKind, Supervisor
from harness.recorder import Recorder
from harness.terminal import console, live, say
from harness.view import status_line, status_view

LINE_EVERY_S = 5.0
EVENTS_SHOWN = 4

_WORTH_A_LINE = frozenset(
    {
        EventKind.KILLED,
        EventKind.DIED,
        EventKind.RESTARTED,
        EventKind.REJOINED,
        EventKind.GAVE_UP,
    }
)


class Screen:
    """Shows a local run. A context manager; `show` fits `harness.local.Show`."""

    def __init__(self, screen: Console | None = None) -> None:
        self.console = screen or console()
        self._live: Live = live(self.console)
        self._next_line_s = 0.0
        self._events_told = 0
        self._handles_told = False
        self._stage_told = ""

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def show(self, status: RunStatus | None, recorder: Recorder, processes: Supervisor) -> None:
        """Draws the state of the run; cheap to call at every tick.

        With the first status it tells the process ids (or containers), for who wants to try what a
        kill -9 does.
        """
        if status is not None and not self._handles_told:
            self._handles_told = True
            handles = ", ".join(f"{name} {found}" for name, found in processes.handles().items())
            line = f"{processes.handle_kind}s: {handles}"
            self.console.print(line, style="dim", highlight=False, soft_wrap=True)
        if self.console.is_terminal:
            self._draw(status, recorder, processes)
        else:
            self._tell(status, processes)

    def _draw(self, status: RunStatus | None, recorder: Recorder, processes: Supervisor) -> None:
        if status is None:
            stage = f"starting: {_stage(processes)} … {processes.now_s:.0f} s"
            self._live.update(Text(stage, "dim"))
            return
        notable = [event for event in processes.events if event.kind in _WORTH_A_LINE]
        losses = [one.loss for one in recorder.evaluations]
        self._live.update(status_view(status, losses, notable[-EVENTS_SHOWN:]))

    def _tell(self, status: RunStatus | None, processes: Supervisor) -> None:
        for event in processes.events[self._events_told :]:
            if event.kind in _WORTH_A_LINE:
                say(_event_line(event))
        self._events_told = len(processes.events)
        if status is None and (stage := _stage(processes)) != self._stage_told:
            self._stage_told = stage
            say(f"starting: {stage} …")
        if status is not None and processes.now_s >= self._next_line_s:
            self._next_line_s = processes.now_s + LINE_EVERY_S
            say(status_line(status))


def _stage(processes: Supervisor) -> str:
    """What a run that has no status yet is at."""
    running = processes.pids()
    if INIT in running:
        return "making the run"
    if COMPILER in running:
        return "compiling what learners and evaluator need"
    return "waiting for the server"


def _event_line(event: Event) -> str:
    code = f", exit code {event.exit_code}" if event.exit_code is not None else ""
    detail = f": {event.detail}" if event.detail else ""
    return f"  {event.name} {event.kind.value.replace('_', ' ')}{code}{detail}"
