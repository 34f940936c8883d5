"""Goodput at several rates of faults as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from harness.chaos.report import spent_shares
from harness.chaos.result import ChaosResult
from harness.fault_rates import FaultRatesResult, models_of

_INK = "#1f2733"
_FAINT = "#8a94a3"
_RULE = "#e4e8ee"


def report(result: FaultRatesResult) -> str:
    """Tables of what was kept, and of where the rest went."""
    calm, first = result.undisturbed, result.runs[0]
    about = (
        f"{calm.learners} learners, a step in {calm.pace_s:g} s, {calm.tokens_trained:,} tokens"
        f" trained in each run, seed {calm.seed}. Each learner is killed with -9 by a schedule of"
        " its own, exponential with the mean time between failures (MTBF) in the first column, and"
        f" its process is started again after {first.repair_s:g} s. Goodput is merged steps over"
        " those that unharmed learners would have made in that time."
    )
    models = (
        "Measured: Decoupled DiLoCo. **Modelled**, under the very kills of that run and with the"
        " median restart measured in it, from a checkpoint every"
        f" {models_of(first).checkpoint_s:g} s that costs nothing: data-parallel training, which"
        " stops as a whole until whoever was killed is back; and the paper's rule, by which each"
        " learner loses its own time alone. A restart is the time from a repair to the next step."
    )
    title = f"# Faults at {len(result.runs)} rates"
    parts = [title, about, _kept(result), models, _where(result)]
    if result.falls_short:
        parts.append("\n".join(["Falls short:", "", *(f"- {one}" for one in result.falls_short)]))
    return "\n\n".join(parts)


def _kept(result: FaultRatesResult) -> str:
    calm = result.undisturbed
    heads = (
        "MTBF", "kills", "restart", "data-parallel (model)", "paper's rule (model)",
        "Decoupled", "of its own without faults", "uptime", "held-out loss", "against no faults",
    )  # fmt: skip
    rows = [
        (
            f"{run.mtbf_s:g} s", f"{run.learner_kills}", f"{models_of(run).restart_s:.1f} s",
            f"{models_of(run).data_parallel:.1%}", f"{models_of(run).papers_rule:.1%}",
            f"**{run.goodput:.1%}**", f"{run.goodput / calm.goodput:.1%}", f"{run.uptime:.1%}",
            f"{run.loss:.4f}", f"{run.loss_gap:+.2%}" if run.loss_gap is not None else "-",
        )
        for run in result.runs
    ]  # fmt: skip
    none = (
        "none", "0", "-", "-", "-", f"**{calm.goodput:.1%}**", "100.0%", f"{calm.uptime:.1%}",
        f"{calm.loss:.4f}", "-",
    )  # fmt: skip
    return _table(heads, [none, *rows])


def _where(result: FaultRatesResult) -> str:
    runs = (result.undisturbed, *result.runs)
    shares = [spent_shares(run.spent) if run.spent is not None else {} for run in runs]
    names = dict.fromkeys(name for each in shares for name in each)
    rows = [(name, *(each.get(name, "-") for each in shares)) for name in names]
    return _table(("where the learners' time went", *(_name(run) for run in runs)), rows)


def _name(run: ChaosResult) -> str:
    return "no faults" if run.mtbf_s is None else f"MTBF {run.mtbf_s:g} s"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = tuple(heads)
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def draw(result: FaultRatesResult, path: Path) -> None:
    """Writes a PNG: goodput over MTBF, measured and modelled."""
    # Never a window: this runs in terminals, containers and tests.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    runs = sorted(result.runs, key=lambda run: run.mtbf_s or 0.0)
    at = [run.mtbf_s or 0.0 for run in runs]
    lines = (
        ("Decoupled, measured", "#c2185b", "-", [run.goodput for run in runs]),
        ("paper's rule, modelled", "#00897b", "--", [models_of(r).papers_rule for r in runs]),
        ("data-parallel, modelled", "#1565c0", "--", [models_of(r).data_parallel for r in runs]),
    )
    axes.axhline(100 * result.undisturbed.goodput, color=_FAINT, linewidth=1, linestyle=":")
    for label, colour, style, shares in lines:
        percent = [100 * share for share in shares]
        axes.plot(at, percent, style, color=colour, marker="o", linewidth=2, label=label)
        for x, y in zip(at, percent, strict=True):
            axes.annotate(
                f"{y:.0f}", (x, y), textcoords="offset points", ha="center",
                xytext=(14, -4) if "Decoupled" in label else (-14, -4),
                fontsize=8, color=colour,
            )  # fmt: skip
    axes.set_title(
        "What is kept of a run in which learners are killed", loc="left", fontsize=12,
        fontweight="bold", color=_INK, pad=10,
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(at, [f"{each:g} s" for each in at])
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
