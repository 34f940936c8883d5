"""A chaos run's result as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.chaos.outages import OutageKind
from harness.chaos.result import ChaosResult, KindFigures, Models, Spent, Spread

_WORDS = {
    OutageKind.PARTITION: "a learner's link cut",
    OutageKind.SLOW: "a learner slowed",
    OutageKind.RATE: "a learner's link narrowed",
    OutageKind.DISK_FULL: "the server's disk full",
}

MERGED = "steps that came into the weights (goodput)"
DOWN = "killed or stopped, until the repair"
RETURNING = "from the repair to the next step"
SLOWER = "steps slower than their pace"


def report(result: ChaosResult) -> str:
    """What was done, what was found, and the figures."""
    broken = "no promise broken" if result.holds else f"{len(result.findings)} promises broken"
    parts = [
        f"# Chaos: {_in_short(result)}, {broken}",
        f"Seed {result.seed}. What is done and how it is judged, `diloco chaos --help` says.",
        _table("what was done", _done(result)),
        _table("what the referee found", _found(result)),
        _table("figures", _figures(result)),
    ]
    if result.unbegun:
        told = "Of the script these never began, since the run was over before:"
        parts.append("\n".join([told, "", *_lines(result.unbegun)]))
    if result.by_kind:
        parts.append(_kinds(result.by_kind))
    if result.models is not None:
        parts.append(_kept(result, result.models))
    if result.spent is not None:
        parts.append(_table("where the learners' time went", percent(spent_shares(result.spent))))
    parts.append(_table("what became of the contributions on the tape", result.fates))
    parts.append(_table("what became of the training data, batches times fragments", _data(result)))
    if result.kills_by_point:
        parts.append(_table("the server killed itself", result.kills_by_point))
    if result.away is not None:
        parts.append(_table("steps while the server was away", result.away.steps))
    if result.findings:
        parts.append("\n".join(["Promises that are broken:", "", *_lines(result.findings)]))
    return "\n\n".join(parts)


def spent_shares(spent: Spent) -> dict[str, float]:
    """Where the learners' time went, in words."""
    return {
        MERGED: spent.merged,
        DOWN: spent.down,
        RETURNING: spent.returning,
        "slowed by a fault": spent.slowed,
        **{f"steps not merged: {reason}": share for reason, share in spent.unmerged.items()},
        SLOWER: spent.slower,
    }


def percent(shares: Mapping[str, float]) -> dict[str, str]:
    """Of all that are not nothing."""
    return {name: f"{share:.1%}" for name, share in shares.items() if abs(share) >= 0.0005}


def _in_short(result: ChaosResult) -> str:
    if not result.outages:
        return f"{result.server_kills} kills of the server, {result.learner_kills} of learners"
    rate = f", MTBF {result.mtbf_s:g} s" if result.mtbf_s is not None else ""
    return f"{len(result.outages)} faults in {result.wall_s:.0f} s{rate}"


def _done(result: ChaosResult) -> dict[str, object]:
    done: dict[str, object] = {
        "learners": f"{result.learners}, a step in {result.pace_s:g} s",
        "kill -9 of the server": result.server_kills,
        "of these at named points": sum(result.kills_by_point.values()),
        "kill -9 of a learner": result.learner_kills,
        "a learner stopped": result.learner_stops,
    }
    for kind in (OutageKind.PARTITION, OutageKind.SLOW, OutageKind.RATE, OutageKind.DISK_FULL):
        if count := sum(outage.what == kind for outage in result.outages):
            done[_WORDS[kind]] = count
    if result.image is not None:
        done["each process in a container of"] = f"`{result.image}`"
    if result.away is not None:
        done["the server kept away"] = f"{result.away.seconds} s"
    if result.mtbf_s is not None:
        done["mean time between failures, of each"] = f"{result.mtbf_s:g} s"
        done["time to repair"] = f"{result.repair_s:g} s"
    return done


def _found(result: ChaosResult) -> dict[str, object]:
    return {
        "contributions acknowledged, by the learners' receipts": result.acknowledged,
        "acknowledged and lost": result.acknowledged_lost,
        "applied twice": result.applied_twice,
        "acknowledged, and undone by an operator": result.voided,
        "batches that count twice": result.data.overlaps,
        "versions computed again from the tape": result.versions,
        "snapshots compared with the tape": result.snapshots,
        "digests that differ": result.digest_mismatches,
        "events on the tape": result.events,
        "starts of the server": result.starts,
        "epochs": result.epochs,
    }


def _figures(result: ChaosResult) -> dict[str, object]:
    unit = result.loss_unit
    figures: dict[str, object] = {
        "server: kill to serving again": _spread(result.recovery_s),
        "learner: kill to the next step": _spread(result.learner_recovery_s),
        "goodput": f"{result.goodput:.1%}",
        "uptime": f"{result.uptime:.1%}",
        "tokens trained": f"{result.tokens_trained:,}",
        "tokens merged": f"{result.tokens_merged:,}",
        "tokens a second": f"{result.tokens_per_s:,.0f}",
        "MB up, down, at the learners' links": f"{_mb(result.bytes_up)}, {_mb(result.bytes_down)}",
        "held-out loss": f"{result.loss:.4f} {unit}, from {result.loss_first:.4f}",
        "took": f"{result.wall_s:.0f} s, of which training was held for {result.held_s:.0f} s",
    }
    if result.loss_undisturbed is not None and result.loss_gap is not None:
        figures["without faults"] = f"{result.loss_undisturbed:.4f} {unit}"
        figures["loss against that"] = f"{result.loss_gap:+.2%}"
    if result.away is not None:
        figures["longest pause of a learner without a server"] = f"{result.away.longest_pause_s} s"
    return figures


def _kinds(by_kind: Mapping[str, KindFigures]) -> str:
    """How soon each kind of fault was over: medians, and the longest."""
    rows = [
        (kind, each.count, _spread(each.down_s), _spread(each.works_again_s),
         _spread(each.counts_again_s))
        for kind, each in by_kind.items()
    ]  # fmt: skip
    heads = ("fault", "times", "to the repair", "to the next step", "until it counts again")
    lines = ["| " + " | ".join(heads) + " |", "|---|--:|--:|--:|--:|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    told = (
        "From the fault, in the median and at most (of how many). The server's next step is an"
        " answer. A learner counts again when its next contribution is acknowledged."
    )
    return "\n".join([*lines, "", told])


def _kept(result: ChaosResult, models: Models) -> str:
    rows = {
        "Decoupled DiLoCo, measured": f"{result.goodput:.1%}",
        "each learner loses its own time alone (the paper's rule), modelled": (
            f"{models.papers_rule:.1%}"
        ),
        "one data-parallel job, modelled": f"{models.data_parallel:.1%}",
    }
    told = (
        f"The models suffer the same faults, and restart in {models.restart_s:g} s, as the"
        " learners do here, from a checkpoint that is written every"
        f" {models.checkpoint_s:g} s at no cost. In a data-parallel job whatever stops, cuts off or"
        " slows one does it to all; its links cost nothing."
    )
    return _table("goodput under these faults", rows) + "\n\n" + told


def _data(result: ChaosResult) -> dict[str, object]:
    return {"merged": result.data.merged, **result.data.gaps}


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f}"


def _spread(spread: Spread) -> str:
    if spread.median is None or spread.max is None:
        return "-"
    return f"{spread.median:.1f} s, at most {spread.max:.1f} s ({spread.count})"


def _table(title: str, rows: Mapping[str, object]) -> str:
    lines = [f"| {title} | |", "|---|--:|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])


def _lines(findings: Iterable[str]) -> Sequence[str]:
    return [f"- {finding}" for finding in findings]
