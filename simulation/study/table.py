"""The tables of a study: one summary a row, paired with the rows that it is held to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from simulation.study.matrix import PlannedRow, Reference, Start, Study
from simulation.study.statistics import Estimate, deviation, estimate, mean
from simulation.study.store import Cell


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


class RowSummary(_Model):
    """One row over its seeds.

    `gap_to_<reference>_percent`: mean over seeds of 100 (loss / the reference's loss - 1), each
    seed against the same seed; `..._interval` is the half-width of its 95% t-interval.
    `share_of_dp_gain`: (alone - loss) / (alone - data-parallel), likewise. None: no such
    reference, or too few seeds. Everything else is the mean over the seeds; bytes are those of all
    learners, over the whole run. `goodput` and `virtual_s` are None for data-parallel in a world
    whose lines have no bandwidth: its gradients take no time there, so that they say nothing.
    """

    about: str
    policy: str
    start: Start
    seeds: tuple[int, ...]
    loss_unit: str
    loss_mean: float
    loss_std: float | None
    gap_to_dp_percent: float | None
    gap_to_dp_interval: float | None
    gap_to_equal_percent: float | None
    gap_to_equal_interval: float | None
    gap_to_sync_percent: float | None
    gap_to_sync_interval: float | None
    share_of_dp_gain: float | None
    share_of_dp_gain_interval: float | None
    goodput: float | None
    merged_share: float
    tokens_trained: int
    virtual_s: float | None
    rounds: float
    bits_up: float | None
    bits_down: float | None
    bytes_up: int
    bytes_down: int
    commits: tuple[str, ...]
    commands: tuple[str, ...]


class Headline(_Model):
    """The whole table; `commit` names all that its cells were made from, `missing` what is not yet
    made.
    """

    study: str
    title: str
    commit: str
    command: str
    isa: str
    missing: tuple[str, ...]
    rows: dict[str, RowSummary]


Cells = Mapping[str, Mapping[int, Cell]]
"""Finished cells by row and seed."""


def summarise(study: Study, rows: Sequence[PlannedRow], cells: Cells) -> Headline:
    """The table of what is finished; a row without a finished cell is left out and named."""
    summaries = {row.name: _summary(row, cells) for row in rows if cells.get(row.name)}
    made = [cell for row in rows for cell in cells.get(row.name, {}).values()]
    missing = [
        f"{row.name} seed {recipe.seed}"
        for row in rows
        for recipe in row.recipes
        if recipe.seed not in cells.get(row.name, {})
    ]
    return Headline(
        study=study.name,
        title=study.title,
        commit=", ".join(sorted({cell.commit for cell in made})),
        command=", ".join(sorted({cell.command for cell in made})),
        isa=", ".join(sorted({cell.isa for cell in made})),
        missing=tuple(missing),
        rows=summaries,
    )


def _summary(row: PlannedRow, cells: Cells) -> RowSummary:
    own = cells[row.name]
    results = [own[seed].result for seed in sorted(own)]
    losses = [result.loss for result in results]
    gaps = {key: _gap(row, cells, key) for key in ("dp", "equal", "sync")}
    share = _share(row, cells)
    is_timed = _is_timed(row)
    bits_up = [result.bits_up for result in results if result.bits_up is not None]
    bits_down = [result.bits_down for result in results if result.bits_down is not None]
    return RowSummary(
        about=row.about,
        policy=results[0].policy,
        start=row.start,
        seeds=tuple(sorted(own)),
        loss_unit=results[0].loss_unit,
        loss_mean=mean(losses),
        loss_std=deviation(losses) if len(losses) > 1 else None,
        gap_to_dp_percent=_mean_of(gaps["dp"]),
        gap_to_dp_interval=_width_of(gaps["dp"]),
        gap_to_equal_percent=_mean_of(gaps["equal"]),
        gap_to_equal_interval=_width_of(gaps["equal"]),
        gap_to_sync_percent=_mean_of(gaps["sync"]),
        gap_to_sync_interval=_width_of(gaps["sync"]),
        share_of_dp_gain=_mean_of(share),
        share_of_dp_gain_interval=_width_of(share),
        goodput=mean([result.goodput for result in results]) if is_timed else None,
        merged_share=mean([result.merged_share for result in results]),
        tokens_trained=round(mean([result.tokens_trained for result in results])),
        virtual_s=mean([result.virtual_s for result in results]) if is_timed else None,
        rounds=mean([result.rounds_merged for result in results]),
        bits_up=mean(bits_up) if bits_up else None,
        bits_down=mean(bits_down) if bits_down else None,
        bytes_up=round(mean([result.bytes_up for result in results])),
        bytes_down=round(mean([result.bytes_down for result in results])),
        commits=tuple(sorted({cell.commit for cell in own.values()})),
        commands=tuple(sorted({cell.command for cell in own.values()})),
    )


def _is_timed(row: PlannedRow) -> bool:
    recipe = row.recipes[0]
    return recipe.kind != "data_parallel" or recipe.run_world.has_bandwidth


def _gap(row: PlannedRow, cells: Cells, key: Reference) -> Estimate | None:
    other = cells.get(row.versus.get(key, ""), {})
    own = cells[row.name]
    paired = [
        100 * (own[seed].result.loss / other[seed].result.loss - 1)
        for seed in sorted(own)
        if seed in other
    ]
    return estimate(paired) if paired else None


def _share(row: PlannedRow, cells: Cells) -> Estimate | None:
    dp, alone = (cells.get(row.versus.get(key, ""), {}) for key in ("dp", "alone"))
    own = cells[row.name]
    shares = []
    for seed in sorted(own):
        if seed in dp and seed in alone:
            worst, best = alone[seed].result.loss, dp[seed].result.loss
            if worst != best:
                shares.append((worst - own[seed].result.loss) / (worst - best))
    return estimate(shares) if shares else None


def _mean_of(value: Estimate | None) -> float | None:
    return None if value is None else value.mean


def _width_of(value: Estimate | None) -> float | None:
    return None if value is None else value.half_width


_LEGEND = (
    "Loss: held-out, {unit}, mean ± standard deviation over the seeds. Gaps and shares: mean of "
    "the paired differences ± half-width of their 95% t-interval. Goodput: useful learner-steps "
    "over those of the same hardware without waits and failures. Merged: share of the trained "
    "tokens. Bits: per parameter and synchronisation. MB: of all learners over the run. "
    "Data-parallel has no time and goodput (-) where no line has a bandwidth: its gradients, many "
    "times the bytes of the others, would take none."
)

_COLUMNS = (
    "row", "seeds", "loss", "gap to data-parallel %", "share of its gain", "gap to equal %",
    "gap to synchronous %", "goodput %", "merged %", "tokens, M", "virtual time, s", "rounds",
    "bits up / down", "MB up / down",
)  # fmt: skip


def markdown(headline: Headline) -> str:
    """The table for people. Losses and gaps with their spread; the rest as means over seeds."""
    first = next(iter(headline.rows.values()), None)
    unit = first.loss_unit if first else "loss"
    lines = [
        f"# {headline.title}",
        "",
        f"Made by `{headline.command}` from {headline.commit}. {_LEGEND.format(unit=unit)}",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|---" + "|--:" * (len(_COLUMNS) - 1) + "|",
        *(_line(name, row) for name, row in headline.rows.items()),
        "",
    ]
    about = [f"- `{name}`: {row.about}" for name, row in headline.rows.items() if row.about]
    if about:
        lines += [*about, ""]
    if headline.missing:
        lines += [f"Not made yet: {len(headline.missing)} cells.", ""]
    return "\n".join(lines)


def _line(name: str, row: RowSummary) -> str:
    bits = "-" if row.bits_up is None else f"{row.bits_up:.2f} / {row.bits_down or 0:.2f}"
    cells = [
        f"`{name}`",
        str(len(row.seeds)),
        _loss(row),
        _with_interval(row.gap_to_dp_percent, row.gap_to_dp_interval, 2),
        _with_interval(row.share_of_dp_gain, row.share_of_dp_gain_interval, 3),
        _with_interval(row.gap_to_equal_percent, row.gap_to_equal_interval, 2),
        _with_interval(row.gap_to_sync_percent, row.gap_to_sync_interval, 2),
        "-" if row.goodput is None else f"{100 * row.goodput:.1f}",
        f"{100 * row.merged_share:.1f}",
        f"{row.tokens_trained / 1e6:.3f}",
        "-" if row.virtual_s is None else f"{row.virtual_s:.0f}",
        f"{row.rounds:.0f}",
        bits,
        f"{row.bytes_up / 1e6:.1f} / {row.bytes_down / 1e6:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _loss(row: RowSummary) -> str:
    if row.loss_std is None or _number(row.loss_mean, 4) == "diverged":
        return _number(row.loss_mean, 4)
    return f"{_number(row.loss_mean, 4)} ± {_number(row.loss_std, 4)}"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) and abs(value) < 1e4 else "diverged"


def _with_interval(value: float | None, half_width: float | None, digits: int) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value) or abs(value) >= 1e4:
        return "diverged"
    sign = "" if digits > 2 else "+"
    text = f"{value:{sign}.{digits}f}"
    return text if half_width is None else f"{text} ± {half_width:.{digits}f}"
