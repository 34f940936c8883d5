"""Goodput at several rates of faults as a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.fault_rates.result import FaultRatesResult, Mean, Rate

_INK = "#1f2733"
_FAINT = "#8a94a3"
_RULE = "#e4e8ee"


@dataclass(frozen=True, slots=True)
class _Line:
    label: str
    colour: str
    style: str
    figure: Callable[[Rate], Mean]
    label_at: tuple[int, int]


_LINES = (
    _Line("Decoupled DiLoCo", "#c2185b", "-", lambda rate: rate.decoupled, (16, -4)),
    _Line("paper's rule, computed", "#00897b", "--", lambda rate: rate.papers_rule, (-16, 4)),
    _Line("synchronous DiLoCo", "#ef6c00", "-", lambda rate: rate.synchronous, (16, -8)),
    _Line("data-parallel", "#1565c0", "-", lambda rate: rate.data_parallel, (16, -8)),
)


def draw(result: FaultRatesResult, path: Path) -> None:
    """Writes a PNG: goodput over MTBF, measured where the label does not say otherwise."""
    # Never a window: this runs in terminals, containers and tests.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rates = sorted(result.rates, key=lambda rate: rate.mtbf_s)
    axes.axhline(100 * result.undisturbed.goodput, color=_FAINT, linewidth=1, linestyle=":")
    for line in _LINES:
        _draw_line(axes, line, rates)
    over = f", over links of {result.rate_mbit:g} Mbit/s" if result.rate_mbit else ""
    axes.set_title(
        f"What is kept of a run in which learners are killed{over}", loc="left", fontsize=12,
        fontweight="bold", color=_INK, pad=10,
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks([rate.mtbf_s for rate in rates], [f"{rate.mtbf_s:g} s" for rate in rates])
    axes.minorticks_off()
    axes.set_ylim(0, 105)
    axes.set_xlabel("mean time between failures of a learner", color=_FAINT, fontsize=9.5)
    axes.set_ylabel("goodput, %", color=_FAINT, fontsize=9.5)
    axes.tick_params(colors=_FAINT, labelsize=9, length=0, pad=6)
    axes.grid(axis="y", color=_RULE, linewidth=0.9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9, labelcolor=_INK)
    part = path.with_suffix(".part")
    figure.savefig(part, format="png")
    part.replace(path)


def _draw_line(axes: Any, line: _Line, rates: list[Rate]) -> None:
    at = [rate.mtbf_s for rate in rates]
    means = [line.figure(rate) for rate in rates]
    percent = [100 * each.mean for each in means]
    axes.errorbar(
        at, percent, yerr=[100 * (each.deviation or 0.0) for each in means], fmt=line.style,
        color=line.colour, marker="o", linewidth=2, elinewidth=1, label=line.label,
    )  # fmt: skip
    for x, y in zip(at, percent, strict=True):
        axes.annotate(
            f"{y:.0f}", (x, y), textcoords="offset points", ha="center", xytext=line.label_at,
            fontsize=8, color=line.colour,
        )  # fmt: skip
