"""The picture of a run: what was learned, and who contributed when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.recorder import Sample, begin_s
from harness.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = "#1f2733"
_FAINT = "#8a94a3"
_RULE = "#e4e8ee"
_LOSS = "#c2185b"
_BIGRAM = "#5f6b7a"
_ALONE = "#e08e0b"
_LEARNERS = ("#1565c0", "#00897b", "#8e24aa", "#6d4c41", "#546e7a", "#c0ca33", "#f4511e", "#039be5")
"""Colours of the learners, in the order of their names; reused beyond eight."""


def draw_run(summary: Summary, samples: Sequence[Sample], path: Path) -> None:
    """Writes a PNG of 1800 x 760 pixels: held-out loss over tokens, merged tokens over time.

    `samples` are the recorder's, in order of time. The baselines are drawn where the summary has
    them; the processes' deaths and returns are marked on the time axis.
    """
    # Never a window: this runs in terminals, containers and tests.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.07), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.12, 1.0))
    _draw_loss(left, summary)
    _draw_learners(right, summary, samples)
    # The figure was made with a constrained layout; the stubs know only that there may be one.
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr,call-arg]
    part = path.with_suffix(".part")
    figure.savefig(part, format="png")
    part.replace(path)


def _style(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=12)
    axes.set_xlabel(xlabel, color=_FAINT, fontsize=9.5)
    axes.set_ylabel(ylabel, color=_FAINT, fontsize=9.5)
    axes.tick_params(colors=_FAINT, labelsize=9, length=0, pad=6)
    axes.grid(axis="y", color=_RULE, linewidth=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_RULE)


def _draw_loss(axes: Axes, summary: Summary) -> None:
    tokens_M = [point.tokens / 1e6 for point in summary.evaluations]
    losses = [point.loss for point in summary.evaluations]
    _style(
        axes,
        "Held-out loss of the global weights",
        "tokens trained by all learners (million)",
        summary.loss_unit,
    )
    right_edge = max(summary.tokens / 1e6, *tokens_M, 1e-9)
    axes.set_xlim(0, right_edge)
    levels = _draw_levels(axes, summary, right_edge)
    axes.plot(tokens_M, losses, color=_LOSS, linewidth=2.2, marker="o", markersize=3.2)
    if not losses:
        return
    axes.annotate(
        f"{losses[-1]:.2f}",
        (tokens_M[-1], losses[-1]),
        (0, -17),
        textcoords="offset points",
        ha="right",
        fontsize=12,
        fontweight="bold",
        color=_LOSS,
    )
    # The first points are far above all that follows and would press it flat.
    low, high = min([*losses, *levels]), max(losses)
    top = min(high, 1.35 * max([*levels, losses[-1]]))
    axes.set_ylim(low - 0.12 * (top - low) - 0.01, top + 0.05 * (top - low) + 0.01)
    if top < high:
        in_view_M = next(x for x, loss in zip(tokens_M, losses, strict=True) if loss <= top)
        axes.annotate(
            f"from {losses[0]:.2f}",
            (in_view_M, top),
            (8, -3),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=_LOSS,
        )


def _draw_levels(axes: Axes, summary: Summary, right_edge: float) -> list[float]:
    """The baselines as lines across; returns their losses.

    The bigram's is soon above the curve, that of one learner alone below it nearly to the end: so
    their names stand where the curve is not.
    """
    alone = f"one learner alone, {summary.alone_tokens / 1e6:.2g}M tokens"
    drawn = []
    for name, level, colour, x, offset, side in (
        ("bigram model", summary.loss_bigram, _BIGRAM, right_edge, 5, "right"),
        (alone, summary.loss_alone, _ALONE, 0.015 * right_edge, -13, "left"),
    ):
        if level is None:
            continue
        axes.axhline(level, color=colour, linewidth=1.3, linestyle=(0, (5, 4)))
        axes.annotate(
            f"{name}  {level:.2f}",
            (x, level),
            (0, offset),
            textcoords="offset points",
            ha=side,
            fontsize=9,
            color=colour,
        )
        drawn.append(level)
    return drawn


def _draw_learners(axes: Axes, summary: Summary, samples: Sequence[Sample]) -> None:
    _style(
        axes,
        "What each learner contributed",
        "seconds",
        "merged tokens (million)",
    )
    start_s = begin_s(samples)
    fastest_s = min((one.pace_s for one in summary.learners), default=0.0)
    ends: list[tuple[float, str, str, Any]] = []
    for index, learner in enumerate(summary.learners):
        colour = _LEARNERS[index % len(_LEARNERS)]
        points = [(s.at_s - start_s, s.learners[learner.name].tokens_merged / 1e6)
                  for s in samples if learner.name in s.learners and s.at_s >= start_s]  # fmt: skip
        if not points:
            continue
        seconds, merged_M = zip(*points, strict=True)
        slow = learner.pace_s > fastest_s
        style: Any = (0, (4, 2)) if slow else "solid"
        axes.step(seconds, merged_M, where="post", color=colour, linewidth=2.0, linestyle=style)
        pace = f", {learner.pace_s:g} s a step" if learner.pace_s else ""
        pace += " (slow by design)" if slow else ""
        text = f"{learner.name}  {learner.steps} steps{pace}"
        ends.append((merged_M[-1], text, colour, style))
        _mark_events(axes, summary, learner.name, start_s, points, colour)
    _label_ends(axes, ends)
    if samples:
        # Not the whole time that the processes took to end, in which nothing was merged.
        axes.set_xlim(0, max(1e-9, min(samples[-1].at_s - start_s, summary.wall_s * 1.03)))
    axes.set_ylim(0, None)


def _label_ends(axes: Axes, ends: list[tuple[float, str, str, Any]]) -> None:
    """A legend in the order of the curves' ends, so that the eye finds each at once."""
    from matplotlib.lines import Line2D

    ends.sort(key=lambda end: end[0], reverse=True)
    handles = [Line2D([], [], color=c, linewidth=2.4, linestyle=style) for _, _, c, style in ends]
    if handles:
        axes.legend(
            handles,
            [text for _, text, _, _ in ends],
            loc="upper left",
            frameon=False,
            fontsize=9,
            labelcolor=_INK,
            handlelength=1.8,
        )


def _mark_events(
    axes: Axes,
    summary: Summary,
    name: str,
    start_s: float,
    points: Sequence[tuple[float, float]],
    colour: str,
) -> None:
    """A cross where the learner died, a ring where it was back, on its own curve."""
    killed_s = [one.at_s for one in summary.events if one.name == name and one.kind == "killed"]
    for event in summary.events:
        if event.name != name or event.kind not in ("killed", "died", "rejoined"):
            continue
        if event.kind == "died" and any(0 <= event.at_s - at_s < 2 for at_s in killed_s):
            continue  # the kill itself is marked
        at_s = event.at_s - start_s
        height_M = max((y for x, y in points if x <= at_s), default=0.0)
        back = event.kind == "rejoined"
        axes.plot(
            [at_s],
            [height_M],
            marker="o" if back else "X",
            markersize=7 if back else 9,
            color="white" if back else colour,
            markeredgecolor=colour if back else "white",
            markeredgewidth=2.0 if back else 1.0,
            zorder=5,
        )
        if not back:
            axes.annotate(
                "kill -9" if event.kind == "killed" else "died",
                (at_s, height_M),
                (2, -16),
                textcoords="offset points",
                fontsize=9,
                color=colour,
            )
