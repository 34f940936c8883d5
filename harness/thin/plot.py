"""The picture of a bench of thin links: tokens a second of both over the links' rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.thin.result import ThinResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = "#1f2733"
_FAINT = "#8a94a3"
_RULE = "#e4e8ee"
_DECOUPLED = "#c2185b"
_PARALLEL = "#1565c0"


def draw_thin(result: ThinResult, path: Path) -> None:
    """Writes a PNG: left, tokens a second, with the ratio beside each point; right, utilisation."""
    # Never a window: this runs in terminals, containers and tests.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.07), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    rates = [point.rate_mbit for point in result.decoupled]
    ours = [point.tokens_per_s for point in result.decoupled]
    theirs = [point.tokens_per_s for point in result.data_parallel]
    _style(left, "Tokens a second of all learners", rates)
    left.set_yscale("log")
    left.plot(rates, ours, color=_DECOUPLED, linewidth=2.2, marker="o", label="Decoupled DiLoCo")
    left.plot(rates, theirs, color=_PARALLEL, linewidth=2.2, marker="o", label="data-parallel")
    for rate, above, below in zip(rates, ours, theirs, strict=True):
        text = f"{above / below:.0f}x" if above >= 10 * below else f"{above / below:.1f}x"
        place = {"textcoords": "offset points", "ha": "center", "fontsize": 10, "color": _INK}
        left.annotate(text, (rate, below), (0, -18), **place)
    left.set_ylim(min(theirs) / 2.5, 2 * max(ours))
    _style(right, "Utilisation: a step's computing over the step", rates)
    right.plot(rates, [100 * p.utilisation for p in result.decoupled], color=_DECOUPLED,
               linewidth=2.2, marker="o", label="Decoupled DiLoCo")  # fmt: skip
    right.plot(rates, [100 * p.utilisation for p in result.data_parallel], color=_PARALLEL,
               linewidth=2.2, marker="o", label="data-parallel")  # fmt: skip
    right.plot(rates, [100 * p.on_schedule for p in result.decoupled], color=_DECOUPLED,
               linewidth=1.2, linestyle=":", label="Decoupled: rounds on schedule")  # fmt: skip
    right.set_ylim(0, 112)
    right.set_ylabel("percent", color=_FAINT, fontsize=9.5)
    for axes in (left, right):
        axes.legend(loc="center right", frameon=False, fontsize=9, labelcolor=_INK)
    part = path.with_suffix(".part")
    figure.savefig(part, format="png")
    part.replace(path)


def _style(axes: Axes, title: str, rates: list[float]) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=12)
    axes.set_xlabel("rate of every site's link, each way (Mbit/s)", color=_FAINT, fontsize=9.5)
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.tick_params(colors=_FAINT, labelsize=9, length=0, pad=6)
    axes.grid(axis="y", color=_RULE, linewidth=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_RULE)
