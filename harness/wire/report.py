"""The result of a wire bench as tables, for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.wire.result import Place, RoundTrip, WireResult
from harness.words import bytes_text, count_text, share_text


def report_view(result: WireResult) -> RenderableType:
    """The stages alone, the round trip, and where its processor time goes."""
    parts: list[RenderableType] = [_stages(result), Text(""), _trip(result.round_trip)]
    for name, places in result.profile.items():
        parts += [Text(""), _profile(name, places)]
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _stages(result: WireResult) -> Table:
    table = _table(
        "stages alone, by fp32 parameters", "stage", "GB/s", "CPU s/GB", "CPU s/GB in a round trip"
    )
    needed = result.stages_cpu_s_per_gb
    for name, ceiling in result.ceilings.items():
        table.add_row(
            name,
            f"{ceiling.fp32_gb_per_s:.2f}",
            f"{ceiling.cpu_s_per_gb:.3f}",
            f"{needed[name]:.3f}" if name in needed else "",
        )
    for name, cost in needed.items():
        if name not in result.ceilings:
            table.add_row(name, "", "", f"{cost:.3f}")
    table.add_section()
    table.add_row("all that a round trip needs", "", "", f"{sum(needed.values()):.3f}")
    return table


def _trip(trip: RoundTrip) -> Table:
    table = _table(
        f"round trip, {count_text(trip.params)} parameters, {trip.learners} learners,"
        f" {trip.fragments} fragments",
        "",
        "",
    )
    table.show_header = False
    table.add_row(
        "fp32 parameters, push to adopted",
        f"{trip.fp32_gb_per_s_per_learner:.3f} GB/s per learner",
    )
    table.add_row(
        "share of what the stages allow",
        f"{share_text(trip.share_of_limit)} of {trip.limit_gb_per_s_per_learner:.3f} GB/s",
    )
    table.add_row("CPU, all processes", f"{trip.cpu_s_per_gb_per_learner:.2f} s per GB and learner")
    table.add_row("up", f"{trip.bits_up:.3f} bits a parameter")
    table.add_row("down", f"{trip.bits_down:.3f} bits a parameter")
    table.add_row("control", f"{trip.control_bytes_per_step:.0f} bytes a step")
    for name, seconds in trip.cpu_s.items():
        peak = bytes_text(trip.peak_bytes[name])
        table.add_row(name, f"{seconds:.1f} CPU s in {trip.window_s:.1f} s, peak {peak}")
    table.add_row(
        "memory above a tiny model's, in models",
        f"server {trip.server_peak_ratio:.2f}, learner {trip.learner_overhead_ratio:.2f}",
    )
    table.add_row(
        "rounds merged",
        f"{trip.rounds} ({trip.rounds_abandoned} put off, {trip.contributions_late} late answers)",
    )
    if trip.slow_readers:
        taken = bytes_text(trip.slow_readers_bytes)
        table.add_row("slow readers beside them", f"{trip.slow_readers}, which took {taken}")
    table.add_row("load of the machine", f"{trip.load_average:.1f}")
    return table


def _profile(name: str, places: tuple[Place, ...]) -> Table:
    table = _table(f"where {name} spends its processor time", "thread | place", "CPU s", "share")
    for each in places:
        table.add_row(each.where, f"{each.cpu_s:.2f}", share_text(each.share))
    return table
