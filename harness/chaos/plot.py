"""The picture of a chaos run: who was there and made steps when, and what was learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.chaos.judgement import Judgement
from harness.chaos.outages import OutageKind
from harness.chaos.recovery import first_after
from harness.chaos.schedule import FaultKind
from harness.chaos.summing import Course
from harness.plan import SERVER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = "#1f2733"
_FAINT = "#8a94a3"
_RULE = "#e4e8ee"
_LOSS = "#c2185b"
_CALM = "#5f6b7a"
_SERVER = "#1f2733"
_HELD = "#f3f5f8"
_LEARNERS = ("#1565c0", "#00897b", "#8e24aa", "#6d4c41", "#546e7a", "#c0ca33", "#f4511e", "#039be5")

_KINDS: dict[str, str] = {
    FaultKind.SERVER_KILL: "#c2185b",
    FaultKind.SERVER_POINT: "#ff8f00",
    FaultKind.SERVER_AWAY: "#5d4037",
    FaultKind.LEARNER_KILL: "#d32f2f",
    FaultKind.LEARNER_STOP: "#7b1fa2",
    OutageKind.KILL: "#d32f2f",
    OutageKind.STOP: "#7b1fa2",
    OutageKind.PARTITION: "#212121",
    OutageKind.SLOW: "#f9a825",
    OutageKind.RATE: "#00838f",
    OutageKind.SERVER_KILL: "#c2185b",
    OutageKind.DISK_FULL: "#6d4c41",
}
"""The colour of each kind of fault."""

_BINS = 600
"""Pieces of time in which a learner has made a step or has not."""


def draw_chaos(course: Course, undisturbed: Judgement | None, path: Path) -> None:
    """Writes a PNG: above, a row for the server and each learner over time, with a gap where it was
    not there, and under it what befell it, in the colour of its kind; below, held-out loss over
    tokens, beside that of the run without faults.
    """
    # Never a window: this runs in terminals, containers and tests.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.6), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=(1.0, 1.2))
    _draw_rows(above, course)
    _draw_losses(below, course.judgement, undisturbed)
    part = path.with_suffix(".part")
    figure.savefig(part, format="png")
    part.replace(path)


def _style(axes: Axes, title: str, xlabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=10)
    axes.set_xlabel(xlabel, color=_FAINT, fontsize=9.5)
    axes.tick_params(colors=_FAINT, labelsize=9, length=0, pad=6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_RULE)


def _draw_rows(axes: Axes, course: Course) -> None:
    _style(axes, "Who was there, and what befell it", "seconds")
    begin_s, end_s = course.span
    long_s = max(1e-9, end_s - begin_s)
    for a, b in course.held:
        axes.axvspan(a - begin_s, b - begin_s, color=_HELD, linewidth=0)
    names = [SERVER, *course.processes]
    for row, name in enumerate(reversed(names)):
        if name == SERVER:
            spans, colour = _served(course), _SERVER
        else:
            spans = _stepped(course, name, long_s / _BINS)
            colour = _LEARNERS[(names.index(name) - 1) % len(_LEARNERS)]
        axes.broken_barh(
            [(a - begin_s, b - a) for a, b in spans], (row - 0.32, 0.64), color=colour, linewidth=0
        )
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_xlim(0, long_s)
    axes.set_ylim(-0.8, len(names) - 0.4)
    _draw_faults(axes, course, {name: row for row, name in enumerate(reversed(names))})


def _draw_faults(axes: Axes, course: Course, rows: dict[str, int]) -> None:
    """A mark where each fault began, and a line for as long as it lasted."""
    begin_s = course.span[0]
    faults = [
        (str(one.kind), one.name, one.began_s + course.offset_s, one.ended_s + course.offset_s)
        for one in course.storm.absences
    ] + [(str(one.outage.what), one.outage.whom, one.began_s, one.ended_s) for one in course.befell]
    for kind, colour in _KINDS.items():
        mine = [
            (rows[name] - 0.44, a - begin_s, b - begin_s) for k, name, a, b in faults if k == kind
        ]
        for row, a, b in mine:
            axes.plot([a, b], [row, row], color=colour, linewidth=2.5, solid_capstyle="butt")
        if mine:
            at = [a for _, a, _ in mine], [row for row, _, _ in mine]
            axes.plot(*at, "^", color=colour, markersize=4.5, label=f"{kind} ({len(mine)})")
    if faults:
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=7, frameon=False, fontsize=8,
            labelcolor=_INK, handletextpad=0.2, columnspacing=1.0,
        )  # fmt: skip


def _served(course: Course) -> list[tuple[float, float]]:
    """From one absence of the server to the next."""
    gone = [
        (one.began_s + course.offset_s, one.ended_s + course.offset_s)
        for one in course.storm.absences
        if one.name == SERVER
    ]
    heard = [at_s + course.offset_s for at_s, _ in course.storm.samples]
    gone += [
        (one.began_s, first_after(heard, one.ended_s) or course.span[1])
        for one in course.befell
        if one.outage.what is OutageKind.SERVER_KILL
    ]
    spans, at_s = [], course.span[0]
    for began_s, ended_s in sorted(gone):
        spans.append((at_s, began_s))
        at_s = ended_s
    return [*spans, (at_s, course.span[1])]


def _stepped(course: Course, name: str, bin_s: float) -> list[tuple[float, float]]:
    """Pieces of time in which a learner made a step, those beside each other joined."""
    begin_s = course.span[0]
    stamps = (at_s for pid in course.processes[name] for at_s in course.storm.steps.times(pid))
    return [
        (begin_s + first * bin_s, begin_s + (last + 1) * bin_s)
        for first, last in _runs(sorted({int((at_s - begin_s) / bin_s) for at_s in stamps}))
    ]


def _runs(numbers: Sequence[int]) -> Iterable[tuple[int, int]]:
    """First and last of each row of consecutive numbers."""
    first = previous = None
    for number in numbers:
        if first is None or previous is None or number != previous + 1:
            if first is not None and previous is not None:
                yield first, previous
            first = number
        previous = number
    if first is not None and previous is not None:
        yield first, previous


def _draw_losses(axes: Axes, judged: Judgement, undisturbed: Judgement | None) -> None:
    _style(axes, "Held-out loss of the global weights", "tokens trained by all learners (million)")
    axes.grid(axis="y", color=_RULE, linewidth=0.9)
    axes.set_ylabel(judged.loss_unit, color=_FAINT, fontsize=9.5)
    drawn = [(judged, _LOSS, "with faults")]
    if undisturbed is not None:
        drawn.insert(0, (undisturbed, _CALM, "without"))
    for one, colour, name in drawn:
        tokens_M = [point.tokens / 1e6 for point in one.losses]
        label = f"{name}  {one.losses[-1].loss:.3f}"
        axes.plot(tokens_M, [p.loss for p in one.losses], color=colour, linewidth=2, label=label)
    axes.legend(loc="upper right", frameon=False, fontsize=9, labelcolor=_INK)
    axes.set_xlim(0, None)
