"""What a person sees of a run: one picture for `diloco status` and the live view, and one line."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fragments.records import LearnerState, LearnerStatus, Phase, RunStatus
from harness.processes import Event, EventKind
from harness.words import (
    bytes_text,
    count_text,
    duration_text,
    loss_text,
    rate_text,
    share_text,
    sparkline,
)

_PHASE_STYLE = {
    Phase.WAITING: "yellow",
    Phase.TRAINING: "green",
    Phase.CLOSING: "cyan",
    Phase.FINISHED: "bold green",
    Phase.DRAINING: "yellow",
}
_STATE_STYLE = {
    LearnerState.JOINED: "yellow",
    LearnerState.TRAINING: "green",
    LearnerState.LOST: "bold red",
    LearnerState.LEFT: "dim",
    LearnerState.EVICTED: "red",
}
_EVENT_STYLE = {
    EventKind.KILLED: "bold red",
    EventKind.DIED: "bold red",
    EventKind.GAVE_UP: "bold red",
    EventKind.RESTARTED: "yellow",
    EventKind.REJOINED: "green",
}


def status_view(
    status: RunStatus, losses: Sequence[float] = (), events: Sequence[Event] = ()
) -> RenderableType:
    """The whole state of a run at a glance.

    `losses` are all held-out losses so far, for the curve; without them, those that the status
    still holds. `events` are the newest things that happened to processes, if anybody watched.
    """
    curve = list(losses) or [evaluation.loss for evaluation in status.evaluations]
    parts: list[RenderableType] = [
        _progress(status),
        _facts(status, curve),
        *([Text(status.stalled, "bold red")] if status.stalled else []),
        Text(""),
        _learners(status.learners),
        *_links(status.learners),
        Text(""),
        _fragments(status),
    ]
    if events:
        parts += [Text(""), _events(events)]
    title = Text.assemble(
        ("run ", "dim"),
        (status.run_id, "bold"),
        ("  "),
        (status.phase.value, _PHASE_STYLE[status.phase]),
    )
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=Text(_subtitle(status), "dim"),
        subtitle_align="left",
        box=box.ROUNDED,
        padding=(0, 1),
    )


def status_line(status: RunStatus) -> str:
    """The same in one line, for logs and pipes."""
    loss = status.evaluations[-1].loss if status.evaluations else float("nan")
    unit = status.evaluations[-1].unit if status.evaluations else ""
    phase = "stalled" if status.stalled else status.phase.value
    learners = ", ".join(
        f"{learner.name} {learner.state.value} {learner.steps}"
        + (" outruns its link" if learner.outruns else "")
        for learner in status.learners
    )
    return (
        f"{duration_text(status.uptime_s)} {phase}: step {status.global_step},"
        f" {count_text(status.tokens_trained)} of {count_text(status.tokens_budget)} tokens,"
        f" {count_text(status.tokens_per_s)}/s, loss {loss_text(loss)} {unit}".rstrip()
        + f", {status.rounds_merged} rounds, up {bytes_text(status.bytes_up)},"
        f" down {bytes_text(status.bytes_down)} | {learners or 'no learner yet'}"
    )


def _subtitle(status: RunStatus) -> str:
    """Who is there now, and why the run is where it is."""
    here = (LearnerState.JOINED, LearnerState.TRAINING)
    live = sum(learner.state in here for learner in status.learners)
    count = f"{live} live learner{'' if live == 1 else 's'}"
    if status.stalled:
        return f"{count} · stalled"
    if status.phase is Phase.WAITING:
        return f"{count}: waiting for more"
    if status.phase is Phase.TRAINING or not status.phase_reason:
        return status.phase_reason or count
    return f"{count} · {status.phase_reason}"


def _progress(status: RunStatus) -> RenderableType:
    share = min(1.0, status.tokens_trained / max(1, status.tokens_budget))
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    row.add_row(
        Text.assemble(("step ", "dim"), (f"{status.global_step}", "bold")),
        ProgressBar(total=1.0, completed=share, width=None),
        Text.assemble(
            (f"{share:.0%}", "bold"),
            (f" of {count_text(status.tokens_budget)} tokens", "dim"),
            (f" · {count_text(status.tokens_per_s)} tokens/s", "dim"),
        ),
    )
    return row


def _facts(status: RunStatus, losses: Sequence[float]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    newest = status.evaluations[-1] if status.evaluations else None
    if newest is None:
        loss = Text("no evaluation yet", "dim")
    else:
        loss = Text.assemble(
            (loss_text(newest.loss), "bold magenta"),
            (f" {newest.unit} at step {newest.global_step}  ", "dim"),
            (sparkline(list(losses), 40), "magenta"),
        )
    grid.add_row(Text("held-out loss", "dim"), loss)
    grid.add_row(
        Text("rounds", "dim"),
        Text(
            f"{status.rounds_merged} merged, {status.rounds_abandoned} abandoned"
            f" · H {status.sync_interval_steps} steps"
        ),
    )
    grid.add_row(
        Text("wide area", "dim"),
        Text(
            f"up {bytes_text(status.bytes_up)} · down {bytes_text(status.bytes_down)}"
            f" since the server's start, {duration_text(status.uptime_s)} ago"
        ),
    )
    receives = rate_text(status.use_receive_mbit, status.cap_receive_mbit)
    sends = rate_text(status.use_send_mbit, status.cap_send_mbit)
    grid.add_row(Text("server", "dim"), Text(f"receives {receives} · sends {sends} Mbit/s"))
    return grid


def _learners(learners: Sequence[LearnerStatus]) -> RenderableType:
    if not learners:
        return Text("no learner has joined yet", "yellow")
    # Made to fit 80 columns, which is why headings take two lines. `behind` is in versions.
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
        expand=True,
        header_style="dim",
    )
    table.add_column("learner", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in (
        *("steps", "s per\nstep", "train\nloss", "rounds\nmerged", "behind", "time\nwaited"),
        *("joins", "MB\nup", "MB\ndown"),
    ):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for learner in learners:
        state = learner.state.value
        if learner.state is LearnerState.LOST:
            state = f"lost {learner.silent_s:.0f} s"
        table.add_row(
            Text(learner.name, "bold"),
            Text(state, _STATE_STYLE[learner.state]),
            f"{learner.steps}",
            f"{learner.step_s:.2f}",
            loss_text(learner.loss),
            f"{learner.contributions_merged}",
            f"{learner.staleness}",
            share_text(learner.wait_share),
            f"{learner.joins}",
            f"{learner.bytes_up / 1e6:.1f}",
            f"{learner.bytes_down / 1e6:.1f}",
        )
    return table


def _links(learners: Sequence[LearnerStatus]) -> list[RenderableType]:
    """What each learner's link carries, of those that have a cap or are outrun by training."""
    lines: list[RenderableType] = []
    for learner in learners:
        if not (learner.cap_up_mbit or learner.cap_down_mbit or learner.outruns):
            continue
        up = rate_text(learner.use_up_mbit, learner.cap_up_mbit)
        down = rate_text(learner.use_down_mbit, learner.cap_down_mbit)
        outruns = ("  training outruns it", "yellow") if learner.outruns else ""
        lines.append(
            Text.assemble(
                ("link of ", "dim"), learner.name, f"  up {up} · down {down} Mbit/s", outruns
            )
        )
    return [Text(""), *lines] if lines else []


def _fragments(status: RunStatus) -> RenderableType:
    line = Text("fragments  ", "dim")
    for fragment in status.fragments:
        line.append(f"{fragment.fragment}", "dim")
        line.append(f" v{fragment.version}", "bold" if fragment.open else "")
        if fragment.open:
            line.append(f" {fragment.answered}/{fragment.asked}", "cyan")
        line.append("   ")
    return line


def _events(events: Sequence[Event]) -> RenderableType:
    lines = []
    for event in events:
        code = f" (exit code {event.exit_code})" if event.exit_code not in (None, 0) else ""
        detail = f": {event.detail}" if event.detail else ""
        lines.append(
            Text.assemble(
                (f"{duration_text(event.at_s):>6}  ", "dim"),
                (f"{event.name} ", "bold"),
                (event.kind.value.replace("_", " "), _EVENT_STYLE.get(event.kind, "")),
                (code + detail, "dim"),
                overflow="ellipsis",
                no_wrap=True,
            )
        )
    return Group(*lines)
