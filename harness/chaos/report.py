"""A chaos run's result as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.chaos.result import ChaosResult, Spread


def report(result: ChaosResult) -> str:
    """What was done, what was found, and the figures."""
    broken = "no promise broken" if result.holds else f"{len(result.findings)} promises broken"
    killed = f"{result.server_kills} kills of the server, {result.learner_kills} of learners"
    parts = [
        f"# Chaos: {killed}, {broken}",
        f"Seed {result.seed}. What is done and how it is judged, `diloco chaos --help` says.",
        _table("what was done", _done(result)),
        _table("what the referee found", _found(result)),
        _table("figures", _figures(result)),
        _table("what became of the contributions on the tape", result.fates),
    ]
    if result.kills_by_point:
        parts.append(_table("the server killed itself", result.kills_by_point))
    if result.away is not None:
        parts.append(_table("steps while the server was away", result.away.steps))
    if result.findings:
        parts.append("\n".join(["Promises that are broken:", "", *_lines(result.findings)]))
    return "\n\n".join(parts)


def _done(result: ChaosResult) -> dict[str, object]:
    done: dict[str, object] = {
        "kill -9 of the server": result.server_kills,
        "of these at named points": sum(result.kills_by_point.values()),
        "kill -9 of a learner": result.learner_kills,
        "a learner stopped beyond its lease": result.learner_stops,
    }
    if result.away is not None:
        done["the server kept away"] = f"{result.away.seconds} s"
    return done


def _found(result: ChaosResult) -> dict[str, object]:
    return {
        "contributions acknowledged, by the learners' receipts": result.acknowledged,
        "acknowledged and lost": result.acknowledged_lost,
        "applied twice": result.applied_twice,
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
        "held-out loss": f"{result.loss:.4f} {unit}, from {result.loss_first:.4f}",
        "took": f"{result.wall_s:.0f} s, of which training was held for {result.held_s:.0f} s",
    }
    if result.loss_undisturbed is not None and result.loss_gap is not None:
        figures["without faults"] = f"{result.loss_undisturbed:.4f} {unit}"
        figures["loss against that"] = f"{result.loss_gap:+.2%}"
    if result.away is not None:
        figures["longest pause of a learner without a server"] = f"{result.away.longest_pause_s} s"
    return figures


def _spread(spread: Spread) -> str:
    if spread.median is None or spread.max is None:
        return "-"
    return f"{spread.median:.1f} s, at most {spread.max:.1f} s ({spread.count})"


def _table(title: str, rows: Mapping[str, object]) -> str:
    lines = [f"| {title} | |", "|---|--:|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])


def _lines(findings: Iterable[str]) -> list[str]:
    return [f"- {finding}" for finding in findings]
