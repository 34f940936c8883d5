"""A finished run as a table with verdicts, for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from harness.summary import Summary, verdicts
from harness.words import bytes_text, count_text, duration_text, share_text


def report_view(summary: Summary) -> RenderableType:
    """What came of the run: the figures, each learner's part, and the verdicts."""
    parts = [_figures(summary), Text(""), _learners(summary), Text(""), _verdicts(summary)]
    title = Text.assemble(
        ("run ", "dim"),
        (summary.run_id, "bold"),
        ("  finished", "bold green") if summary.finished else ("  not finished", "bold red"),
    )
    return Panel(Group(*parts), title=title, title_align="left", box=box.ROUNDED, padding=(0, 1))


def _figures(summary: Summary) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    unit = summary.loss_unit
    if summary.loss_first is not None and summary.loss_last is not None:
        grid.add_row(
            Text("held-out loss", "dim"),
            Text.assemble(
                f"{summary.loss_first:.3f} → ",
                (f"{summary.loss_last:.3f}", "bold magenta"),
                (f" {unit}", "dim"),
            ),
        )
    baselines = []
    if summary.loss_bigram is not None:
        baselines.append(f"bigram model {summary.loss_bigram:.3f}")
    if summary.loss_alone is not None:
        baselines.append(
            f"one learner alone {summary.loss_alone:.3f}"
            f" ({count_text(summary.alone_tokens)} tokens, {summary.alone_wall_s:.0f} s)"
        )
    if baselines:
        grid.add_row(Text("to compare with", "dim"), Text(" · ".join(baselines)))
    rate = summary.tokens / summary.wall_s if summary.wall_s else 0.0
    grid.add_row(
        Text("trained", "dim"),
        Text(
            f"{count_text(summary.tokens)} tokens in {duration_text(summary.wall_s)}"
            f" ({count_text(rate)} tokens/s), {summary.global_step} global steps"
        ),
    )
    grid.add_row(
        Text("rounds", "dim"),
        Text(f"{summary.rounds} merged, {summary.rounds_abandoned} abandoned"),
    )
    grid.add_row(
        Text("wide area", "dim"),
        Text(f"up {bytes_text(summary.bytes_up)} · down {bytes_text(summary.bytes_down)}"),
    )
    return grid


def _learners(summary: Summary) -> RenderableType:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
        expand=True,
        header_style="dim",
    )
    table.add_column("learner", no_wrap=True)
    for heading in (
        *("s per\nstep", "steps", "tokens", "rounds\nmerged", "tokens\nmerged", "late"),
        *("time\nwaited", "joins", "digest"),
    ):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for one in summary.learners:
        same = one.digest == summary.weights_digest
        table.add_row(
            Text(one.name, "bold"),
            f"{one.pace_s or one.step_s:.2f}",
            f"{one.steps}",
            count_text(one.tokens),
            f"{one.contributions_merged}",
            count_text(one.tokens_merged),
            f"{one.contributions_late}",
            share_text(one.wait_share),
            f"{one.joins}",
            Text(one.digest[:10] or "none", "green" if same else "bold red"),
        )
    return table


def _verdicts(summary: Summary) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for verdict in verdicts(summary):
        mark = Text("✓", "bold green") if verdict.holds else Text("✗", "bold red")
        grid.add_row(mark, Text.assemble(verdict.claim, (f"  {verdict.figures}", "dim")))
    return grid
