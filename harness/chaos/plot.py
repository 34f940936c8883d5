"""The picture of a chaos run: who was there and made steps when, and what was learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.chaos.judgement import Judgement
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

_BINS = 600
"""Pieces of time in which a learner has made a step or has not."""


def draw_chaos(course: Course, undisturbed: Judgement | None, path: Path) -> None:
    """Writes a PNG: above, a row for the server and each learner over time, with a gap where it was
    not there; below, held-out loss over tokens, beside that of the run without faults.
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
    _style(axes, "Who was there: the server serves, learners make steps", "seconds")
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
        killed = [
            one.began_s + course.offset_s - begin_s
            for one in course.storm.absences
            if one.name == name and one.kind is not FaultKind.LEARNER_STOP
        ]
        axes.plot(killed, [row + 0.42] * len(killed), "v", color=_LOSS, markersize=4)
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_xlim(0, long_s)


def _served(course: Course) -> list[tuple[float, float]]:
    """From one absence of the server to the next."""
    spans, at_s = [], course.span[0]
    for one in course.storm.absences:
        if one.name == SERVER:
            spans.append((at_s, one.began_s + course.offset_s))
            at_s = one.ended_s + course.offset_s
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
