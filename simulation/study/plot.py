"""Pictures of a study: how the loss falls, and how far each row is from what it is held to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simulation.study.table import Cells, Headline, RowSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#1f2733"
_FAINT = "#8a94a3"
_RULE = "#e4e8ee"
_COLOURS = (
    "#1565c0", "#c2185b", "#00897b", "#e08e0b", "#8e24aa", "#6d4c41", "#546e7a", "#7cb342",
    "#f4511e", "#039be5",
)  # fmt: skip

_WIDEST = 30.0
"""Gaps beyond this (%) are told, not drawn: all others could not be told apart."""

MAX_CURVES = 10
"""More curves than this cannot be told apart; the table has the rest."""


def draw_gaps(headline: Headline, path: Path) -> bool:
    """Writes a PNG: every row's gap to data-parallel with its 95% interval.

    False, and nothing written, where no row has one.
    """
    rows = [
        (name, row)
        for name, row in headline.rows.items()
        if row.gap_to_dp_percent is not None and abs(row.gap_to_dp_percent) < 1e4
    ]
    if not rows:
        return False
    figure = _canvas(10, 1.2 + 0.3 * len(rows))
    axes = figure.subplots()
    ends = [0.0]
    for place, (_, row) in enumerate(rows):
        gap, width = row.gap_to_dp_percent or 0.0, row.gap_to_dp_interval or 0.0
        if abs(gap) <= _WIDEST:
            ends += [gap - min(width, _WIDEST), gap + min(width, _WIDEST)]
            axes.errorbar(
                [gap], [place], xerr=[width], fmt="o", color=_colour(row), markersize=5,
                capsize=3, linewidth=1.4,
            )  # fmt: skip
        axes.text(
            1.02, place, _in_words(row), transform=axes.get_yaxis_transform(), va="center",
            fontsize=8, color=_INK,
        )  # fmt: skip
    margin = 0.04 * (max(ends) - min(ends)) + 0.1
    axes.set_xlim(min(ends) - margin, max(ends) + margin)
    for place, (_, row) in enumerate(rows):
        gap = row.gap_to_dp_percent or 0.0
        if abs(gap) > _WIDEST:  # Beyond the picture: a hand towards it.
            axes.plot(
                [0.985 if gap > 0 else 0.015], [place], marker=">" if gap > 0 else "<",
                color=_colour(row), markersize=6, transform=axes.get_yaxis_transform(),
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.axvline(0.0, color=_FAINT, linewidth=1.0)
    what = "gap in %, with its 95% interval; blue: warm starts, orange: from scratch"
    _style(axes, "Held-out loss against data-parallel", what, "")
    axes.grid(axis="x", color=_RULE, linewidth=0.9)
    _write(figure, path)
    return True


def _colour(row: RowSummary) -> str:
    return _COLOURS[0] if row.start == "warm" else _COLOURS[3]


def _in_words(row: RowSummary) -> str:
    gap, width = row.gap_to_dp_percent or 0.0, row.gap_to_dp_interval
    digits = 2 if abs(gap) <= _WIDEST else 0
    return f"{gap:+.{digits}f}" + ("" if width is None else f" ± {width:.{digits}f}")


def draw_bits(headline: Headline, path: Path) -> bool:
    """Writes a PNG: every row's gap to its "equal" against its bits a parameter, both ways' mean.

    False, and nothing written, where no row has both.
    """
    points = [
        (name, row, (row.bits_up + row.bits_down) / 2, row.gap_to_equal_percent)
        for name, row in headline.rows.items()
        if row.policy == "decoupled" and row.gap_to_equal_percent is not None
        if row.bits_up is not None and row.bits_down is not None
    ]
    if not points:
        return False
    figure = _canvas(8.5, 4.5)
    axes = figure.subplots()
    for name, row, bits, gap in points:
        axes.errorbar(
            [bits], [gap], yerr=[row.gap_to_equal_interval or 0.0],
            fmt="o", color=_COLOURS[0], markersize=5, capsize=3, linewidth=1.4,
        )  # fmt: skip
        axes.annotate(name, (bits, gap), (5, 5), textcoords="offset points", fontsize=7.5)
    axes.axhline(0.0, color=_FAINT, linewidth=1.0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    _style(axes, "Held-out loss against bits", "bits a parameter and synchronisation", "gap in %")
    axes.grid(color=_RULE, linewidth=0.9)
    _write(figure, path)
    return True


def draw_curves(headline: Headline, cells: Cells, path: Path) -> bool:
    """Writes a PNG: held-out loss over tokens and over virtual time, means over the seeds.

    The first MAX_CURVES rows that did not diverge. False where there is none.
    """
    fit = [
        name
        for name, row in headline.rows.items()
        if np.isfinite(row.loss_mean) and row.loss_mean < 1e4
    ]
    names = fit[:MAX_CURVES]
    if not names:
        return False
    figure = _canvas(13, 5)
    left, right = figure.subplots(1, 2)
    for name, colour in zip(names, _COLOURS, strict=False):
        tokens, seconds, losses = _mean_curve(name, cells)
        left.plot(tokens / 1e6, losses, color=colour, linewidth=1.6, label=name)
        if headline.rows[name].virtual_s is not None:
            right.plot(seconds, losses, color=colour, linewidth=1.6)
    unit = headline.rows[names[0]].loss_unit
    among = "" if len(fit) == len(names) else f", the first {len(names)} of {len(fit)} rows"
    _style(left, f"Held-out loss by tokens{among}", "tokens of all learners (million)", unit)
    _style(right, "and by virtual time", "seconds", "")
    final = [headline.rows[name].loss_mean for name in names]
    for one in (left, right):
        # From scratch the first points are far above all that can be compared.
        one.set_ylim(min(final) * 0.98, max(final) * 1.6)
        one.grid(axis="y", color=_RULE, linewidth=0.9)
    left.legend(frameon=False, fontsize=8.5, labelcolor=_INK)
    _write(figure, path)
    return True


def _mean_curve(name: str, cells: Cells) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    curves = [cell.result.curve for cell in cells[name].values()]
    count = min(len(curve) for curve in curves)
    # A curve's last point is that of the end; the marks before it are at equal shares.
    aligned = [(*curve[: count - 1], curve[-1]) for curve in curves]

    def mean_of(values: Sequence[Sequence[float]]) -> np.ndarray:
        return np.asarray(np.mean(np.asarray(values), axis=0))

    return (
        mean_of([[point.tokens for point in curve] for curve in aligned]),
        mean_of([[point.at_s for point in curve] for curve in aligned]),
        mean_of([[point.loss for point in curve] for curve in aligned]),
    )


def _canvas(width: float, height: float) -> Figure:
    # Never a window: this runs in terminals, containers and tests.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _style(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.set_xlabel(xlabel, color=_FAINT, fontsize=9)
    axes.set_ylabel(ylabel, color=_FAINT, fontsize=9)
    axes.tick_params(colors=_INK, labelsize=8.5, length=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_RULE)


def _write(figure: Figure, path: Path) -> None:
    part = path.with_suffix(".part")
    figure.savefig(part, format="png")
    part.replace(path)
