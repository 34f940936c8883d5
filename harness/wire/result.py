"""The result of a wire bench: what its JSON is."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from harness.wire.ceiling import Ceiling
from harness.wire.probe import PROBE, ProbeReport

_MOST_PLACES = 16
_LEAST_SHARE = 0.01


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Place(_Record):
    """Processor time of one process in one place; see `harness.wire.probe`."""

    where: str
    cpu_s: float
    share: float = Field(description="of the process's processor time")


class RoundTrip(_Record):
    """The whole path between processes, over the measured window."""

    params: int
    learners: int
    fragments: int
    slow_readers: int = Field(description="beside the learners; see `harness.wire.readers`")
    slow_readers_bytes: int = Field(description="that these took")
    window_s: float
    rounds: int
    rounds_abandoned: int
    contributions_late: int
    fp32_gb_per_s_per_learner: float = Field(
        description="4 bytes a parameter, once for a full round trip"
    )
    limit_gb_per_s_per_learner: float = Field(
        description="what the stages' processor costs allow when spread over the cores"
    )
    share_of_limit: float
    bits_up: float = Field(description="a parameter, everything on the bulk connections counted")
    bits_down: float
    control_bytes_per_step: float = Field(description="a learner's step, both directions")
    server_peak_ratio: float = Field(
        description="(peak memory - that of a 1,000-parameter model) / 4 bytes a parameter"
    )
    learner_overhead_ratio: float = Field(
        description="the same of the largest learner, whose program holds no parameters of its own"
    )
    cpu_s_per_gb_per_learner: float = Field(description="all processes together")
    cpu_s: dict[str, float] = Field(
        description="processor seconds in the window, by process, without those of the probe"
    )
    peak_bytes: dict[str, int]
    load_average: float = Field(description="of the machine over the last minute, at the end")


class WireResult(_Record):
    """All that one bench measures."""

    cores: int
    ceilings: dict[str, Ceiling]
    round_trip: RoundTrip
    stages_cpu_s_per_gb: dict[str, float] = Field(
        description="what the limit is made of: processor seconds by stage, per GB and learner"
    )
    profile: dict[str, tuple[Place, ...]] = Field(
        description="where the server and one learner spend their processor time"
    )


def stage_costs(
    ceilings: Mapping[str, Ceiling], learners: int, bits_up: float, bits_down: float
) -> dict[str, float]:
    """Processor seconds that each stage of a round trip must cost, per GB and learner.

    Each stage counts as often as a round trip cannot do without it, which may be less often than it
    is done today. What the server does once a round is shared by the learners. The wire costs what
    gRPC takes for as many bytes, at both ends.
    """

    def cost(name: str) -> float:
        return ceilings[name].cpu_s_per_gb

    return {
        "progress": cost("progress"),
        "quantize": cost("quantize"),
        "encode": cost("encode"),
        "send_up": cost("grpc") * bits_up / 32,
        "server_decode": cost("decode"),
        "merge": cost("merge"),
        "outer_step": cost("outer_step") / learners,
        "server_encode": cost("encode") / learners,
        "send_down": cost("grpc") * bits_down / 32,
        "decode": cost("decode"),
        "advance": cost("advance"),
        "unpack": cost("unpack"),
    }


def limit_gb_per_s(costs: Mapping[str, float], learners: int, cores: int) -> float:
    """GB/s per learner with all cores busy with nothing but these stages."""
    return cores / (learners * sum(costs.values()))


def peak_ratio(peak_bytes: int, small_peak_bytes: int, params: int) -> float:
    """Memory above that of a tiny model, in sizes of the model as float32."""
    return (peak_bytes - small_peak_bytes) / (4 * params)


def hottest(before: ProbeReport, after: ProbeReport) -> tuple[Place, ...]:
    """Where the time between two reports of a process went, the most first; crumbs left out."""
    used_s: dict[str, float] = {}
    for thread, cpu_s in after.cpu_s.items():
        if thread == PROBE:
            continue
        spent_s = cpu_s - before.cpu_s.get(thread, 0.0)
        seen = _grown(before.seen.get(thread, {}), after.seen.get(thread, {}))
        whole = sum(seen.values())
        # A thread that was never seen at work is a place of its own.
        for where, weight in seen.items() if whole > 0 else [("", 1.0)]:
            used_s[f"{thread} | {where}"] = spent_s * (weight / whole if whole > 0 else 1.0)
    total_s = sum(used_s.values())
    ranked = sorted(used_s.items(), key=lambda item: -item[1])[:_MOST_PLACES]
    return tuple(
        Place(where=where, cpu_s=round(cpu_s, 3), share=round(cpu_s / total_s, 4))
        for where, cpu_s in ranked
        if cpu_s > _LEAST_SHARE * total_s
    )


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {where: weight - before.get(where, 0.0) for where, weight in after.items()}
