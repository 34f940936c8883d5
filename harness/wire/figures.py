"""From the readings of a bench to its result."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fragments.errors import DilocoError
from harness.plan import SERVER
from harness.wire.ceiling import Ceiling
from harness.wire.plan import WirePlan
from harness.wire.probe import ProbeReport
from harness.wire.result import (
    RoundTrip,
    WireResult,
    hottest,
    limit_gb_per_s,
    peak_ratio,
    stage_costs,
)
from harness.wire.session import Measured
from harness.wire.window import Reading, Window, bulk_traffic, lasting_traffic


def figures(
    plan: WirePlan, ceilings: Mapping[str, Ceiling], floor: Reading, measured: Measured
) -> WireResult:
    """What comes of it; `floor` is the last reading of the processes of a tiny model.

    Raises:
        DilocoError: when no round was merged, or a bulk connection broke.
    """
    window, learners = measured.window, plan.learners
    if window.pushed_values == 0:
        raise DilocoError("no contribution was merged while it was measured")
    bits_up, bits_down = _bits(measured, learners)
    costs = stage_costs(ceilings, learners, bits_up, bits_down)
    cores = len(os.sched_getaffinity(0))
    limit = limit_gb_per_s(costs, learners, cores)
    gb = 4 * window.pushed_values / learners / 1e9
    rate, used_s = gb / window.seconds, window.cpu_s()
    params = sum(each.num_values for each in window.end.status.fragments)
    peaks = window.end.peak_bytes
    ratios = {n: peak_ratio(peak, floor.peak_bytes[n], params) for n, peak in peaks.items()}
    trip = RoundTrip(
        params=params,
        learners=learners,
        fragments=plan.fragments,
        slow_readers=plan.slow_readers,
        slow_readers_bytes=measured.read_bytes,
        window_s=round(window.seconds, 2),
        rounds=window.rounds,
        rounds_abandoned=window.grown(lambda status: status.rounds_abandoned),
        contributions_late=window.learners_grown(lambda learner: learner.contributions_late),
        fp32_gb_per_s_per_learner=round(rate, 4),
        limit_gb_per_s_per_learner=round(limit, 4),
        share_of_limit=round(rate / limit, 4),
        bits_up=round(bits_up, 4),
        bits_down=round(bits_down, 4),
        control_bytes_per_step=round(_control_bytes_per_step(measured), 1),
        server_peak_ratio=round(ratios[SERVER], 3),
        learner_overhead_ratio=round(max(ratios[name] for name in plan.names), 3),
        cpu_s_per_gb_per_learner=round(sum(used_s.values()) / (gb * learners), 3),
        cpu_s={name: round(seconds, 2) for name, seconds in used_s.items()},
        peak_bytes=dict(peaks),
        load_average=round(os.getloadavg()[0], 2),
    )
    return WireResult(
        cores=cores,
        ceilings=dict(ceilings),
        round_trip=trip,
        stages_cpu_s_per_gb={name: round(cost, 4) for name, cost in costs.items()},
        profile={
            name: hottest(window.begin.probes[name], window.end.probes[name])
            for name in (SERVER, plan.names[0])
        },
    )


def _bits(measured: Measured, learners: int) -> tuple[float, float]:
    """Bits a parameter on the bulk connections, up and down: a learner pushes what it takes part
    in, and pulls every version.
    """
    window = measured.window
    bulk = bulk_traffic(*_servers(window), port=measured.bulk_port, without=measured.readers)
    return (
        8 * bulk.up_bytes / window.pushed_values,
        8 * bulk.down_bytes / (window.published_values * learners),
    )


def _control_bytes_per_step(measured: Measured) -> float:
    window = measured.window
    control = lasting_traffic(*_servers(window), port=measured.control_port)
    steps = window.learners_grown(lambda learner: learner.steps)
    return (control.up_bytes + control.down_bytes) / max(1, steps)


def _servers(window: Window) -> tuple[ProbeReport, ProbeReport]:
    return window.begin.probes[SERVER], window.end.probes[SERVER]
