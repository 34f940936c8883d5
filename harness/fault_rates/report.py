"""Goodput at several rates of faults as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean

from harness.chaos.report import DOWN, MERGED, RETURNING, SLOWER, percent, spent_shares
from harness.chaos.result import ChaosResult, Spread
from harness.dataparallel.lives import JobResult
from harness.fault_rates.result import FaultRatesResult, Rate, bound_of

_AGAIN = "steps made again after a restart"


def report(result: FaultRatesResult) -> str:
    """Tables of what was kept, and of where the rest went."""
    rates = result.rates
    if not rates:
        calm = f"Without faults Decoupled DiLoCo keeps {result.undisturbed.goodput:.1%}."
        return "\n\n".join(["# Faults: no schedule has finished", calm, *_ends(result)])
    parts = [
        f"# Faults at {len(rates)} rate{'s' if len(rates) > 1 else ''}{_over(result)}",
        _about(result),
        _kept(result),
        _what(result),
        _well(result),
        *(_where(rate) for rate in rates),
        _late(result),
        *_ends(result),
    ]
    return "\n\n".join(parts)


def _ends(result: FaultRatesResult) -> list[str]:
    """What is missing, and what falls short."""
    lists = {"Missing:": result.missing, "Falls short:": result.falls_short}
    return [
        "\n".join([head, "", *(f"- {one}" for one in each)]) for head, each in lists.items() if each
    ]


def _over(result: FaultRatesResult) -> str:
    if not result.rate_mbit:
        return ""
    far = f" and {result.delay_ms:g} ms" if result.delay_ms else ""
    return f" over links of {result.rate_mbit:g} Mbit/s{far}"


def _about(result: FaultRatesResult) -> str:
    calm = result.undisturbed
    seeds = sorted({run.seed for run in result.runs})
    words = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    spread = "" if len(seeds) == 1 else ", means and standard deviations over the seeds"
    return (
        f"{calm.learners} learners, a step in {calm.pace_s:g} s, schedules of {words}{spread}."
        " Each learner is killed with -9 by one of its own, exponential with the mean time between"
        " failures (MTBF) in the first column, and repaired after"
        f" {result.repair_s:g} s. From the repair to the next step pass {result.restart_s:g} s, by"
        " a setting, for everybody: processes are started at the kill and held until then, so that"
        " this machine's cores are not what is measured. Everybody writes a checkpoint every"
        f" {result.checkpoint_s:g} s. Times count on this machine's monotonic clock: with"
        " DiLoCo from when all learners have made a step, of the data-parallel job from when its"
        f" workers begin their first.{_links(result)}"
    )


def _links(result: FaultRatesResult) -> str:
    if not result.rate_mbit:
        return ""
    by = result.delayed_by
    made = f" The relay makes its delay itself; that between workers is made by {by}." if by else ""
    return (
        f" Each learner is behind a link of {result.rate_mbit:g} Mbit/s each way"
        f"{f' and {result.delay_ms:g} ms one way' if result.delay_ms else ''}: a relay in user"
        " space before the outer server, a device of the kernel's between the workers of the"
        " data-parallel job, which counts TCP/IP's headers, some 4%, and has TCP find its rate."
        f"{made}"
    )


def _kept(result: FaultRatesResult) -> str:
    heads = (
        "MTBF", "kills", "data-parallel", "synchronous DiLoCo (K=M)", "Decoupled DiLoCo",
        "paper's rule (computed)", "Decoupled, of its own without faults",
    )  # fmt: skip
    calm, judged = result.undisturbed.goodput, result.judged
    rows = [
        (
            f"{rate.mtbf_s:g} s{' (judged)' if rate.mtbf_s == judged.mtbf_s else ''}",
            _mean_count(run.decoupled.learner_kills for run in rate.runs),
            str(rate.data_parallel), str(rate.synchronous), f"**{rate.decoupled}**",
            str(rate.papers_rule), str(rate.mean(lambda run: run.decoupled.goodput / calm)),
        )
        for rate in result.rates
    ]  # fmt: skip
    none = ("none", "0", "-", "-", f"**{calm:.1%}**", "-", "100.0%")
    return _table(heads, [none, *rows])


def _what(result: FaultRatesResult) -> str:
    judged = result.judged
    unasked = (
        " That it keeps 55 to 60% is not asked for here: its links take their share as well."
        if result.rate_mbit
        else ""
    )
    return (
        "Goodput is the steps that count over those that unharmed learners would have made in that"
        " time at their pace. All are measured, with real processes under one schedule, but the"
        " rule: by the paper M learners behave like one job that loses an M-th of its chips while"
        " one of them is away, so each loses its own time alone, under these kills, with this"
        f" restart and from a checkpoint. **Data-parallel**: {result.undisturbed.learners} workers"
        " of one job (`jax.distributed`, Gloo), which ends with any of them and is started again as"
        " a whole from its checkpoint; its steps exchange gradients over"
        f" {'its links' if result.rate_mbit else 'loopback'}; it runs as long as Decoupled DiLoCo,"
        " and steps that are made again count once. **Synchronous DiLoCo**: the same server and"
        " learners: all that are there must answer before anybody goes on;"
        " it trains the same tokens as Decoupled DiLoCo, under the same schedule, for as long as"
        " that takes. Judged is the MTBF at which"
        f" data-parallel training keeps what is nearest to 57.5%: {judged.mtbf_s:g} s, where"
        f" Decoupled DiLoCo is to keep {bound_of(judged):.1%}.{unasked}"
    )


def _well(result: FaultRatesResult) -> str:
    heads = (
        "MTBF", "uptime: data-parallel", "K=M", "Decoupled", "held-out loss: K=M", "Decoupled",
        "against no faults",
    )  # fmt: skip
    calm = result.undisturbed
    none = ("none", "-", "-", f"{calm.uptime:.1%}", "-", f"{calm.loss:.4f}", "-")
    rows = [
        (
            f"{rate.mtbf_s:g} s",
            str(rate.mean(lambda run: run.data_parallel.uptime)),
            str(rate.mean(lambda run: run.synchronous.uptime)),
            str(rate.mean(lambda run: run.decoupled.uptime)),
            f"{rate.mean(lambda run: run.synchronous.loss).mean:.4f}",
            f"{rate.mean(lambda run: run.decoupled.loss).mean:.4f}",
            f"{rate.mean(lambda run: run.decoupled.loss_gap or 0.0).mean:+.2%}",
        )
        for rate in result.rates
    ]  # fmt: skip
    return (
        _table(heads, [none, *rows])
        + f"\n\nLosses are in {calm.loss_unit}, at {calm.tokens_trained:,} trained tokens. Uptime"
        " is the share of seconds in which somebody made a step that was handed in."
    )


def _where(rate: Rate) -> str:
    heads = (f"where the time went, MTBF {rate.mtbf_s:g} s", "data-parallel", "K=M", "Decoupled")
    shares = (
        _mean_shares(_of_job(run.data_parallel) for run in rate.runs),
        _mean_shares(_of_chaos(run.synchronous) for run in rate.runs),
        _mean_shares(_of_chaos(run.decoupled) for run in rate.runs),
    )
    told = [percent(each) for each in shares]
    names = dict.fromkeys(name for each in told for name in each)
    order = [MERGED, *(name for name in names if name not in (MERGED, SLOWER)), SLOWER]
    return _table(heads, [(n, *(each.get(n, "-") for each in told)) for n in order if n in names])


def _of_job(job: JobResult) -> dict[str, float]:
    return {
        MERGED: job.goodput,
        DOWN: job.down,
        RETURNING: job.returning,
        _AGAIN: job.made_again,
        SLOWER: job.slower,
    }


def _of_chaos(run: ChaosResult) -> dict[str, float]:
    return spent_shares(run.spent) if run.spent is not None else {}


def _mean_shares(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    shares = list(each)
    names = dict.fromkeys(name for one in shares for name in one)
    return {name: fmean(one.get(name, 0.0) for one in shares) for name in names}


def _late(result: FaultRatesResult) -> str:
    ways = {
        "data-parallel": [run.data_parallel.late_s for run in result.runs],
        "synchronous": [run.synchronous.late_s for run in result.runs],
        "Decoupled": [run.decoupled.late_s for run in result.runs],
    }
    late = {way: words for way, spreads in ways.items() if (words := _most(spreads))}
    if not late:
        return "No restart took longer than it was to take."
    told = "; ".join(f"{way} {words}" for way, words in late.items())
    return f"Restarts that took longer than they were to take, more than this setting says: {told}."


def _most(spreads: Iterable[Spread]) -> str:
    late = [(each.count, each.max) for each in spreads if each.max is not None]
    if not late:
        return ""
    return f"{sum(count for count, _ in late)}, by at most {max(most for _, most in late):.1f} s"


def _mean_count(counts: Iterable[int]) -> str:
    return f"{fmean(counts):.1f}".removesuffix(".0")


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = tuple(heads)
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
