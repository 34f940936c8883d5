"""The measured window: readings of all processes at its two ends, and what lies between them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fragments.errors import DilocoError
from fragments.records import LearnerStatus, RunStatus
from harness.wire.probe import ASK, PROBE, Connection, ProbeReport
from harness.wire.processes import cpu_s, peak_bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything at one moment; the mappings are by process."""

    at_s: float
    status: RunStatus
    cpu_s: Mapping[str, float]
    peak_bytes: Mapping[str, int]
    probes: Mapping[str, ProbeReport]


def read(
    status: Callable[[], RunStatus],
    pids: Mapping[str, int],
    reports: Mapping[str, Path],
    wait: Callable[[Callable[[], bool]], None],
) -> Reading:
    """A reading; the probes of `reports` are asked, and `wait` waits until all have written."""
    for name, report in reports.items():
        report.unlink(missing_ok=True)
        os.kill(pids[name], ASK)
    at_s = time.monotonic()
    now = status()
    used_s = {name: cpu_s(pid) for name, pid in pids.items()}
    wait(lambda: all(report.exists() for report in reports.values()))
    return Reading(
        at_s,
        now,
        used_s,
        {name: peak_bytes(pid) for name, pid in pids.items()},
        {
            name: ProbeReport.model_validate_json(report.read_bytes())
            for name, report in reports.items()
        },
    )


def least_merged(status: RunStatus) -> int:
    """Contributions of that learner of which the fewest are merged."""
    return min(each.contributions_merged for each in status.learners)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a port's connections, as their server sees them: in is up."""

    up_bytes: int
    down_bytes: int


def bulk_traffic(
    before: ProbeReport, after: ProbeReport, port: int, without: frozenset[int]
) -> Traffic:
    """What went through all connections to `port` but those from the ports `without`.

    Raises:
        DilocoError: when one of them has ended in between, so that its last bytes are not known.
    """
    olds, news = (
        {peer: each for peer, each in _by_peer(report, port).items() if peer not in without}
        for report in (before, after)
    )
    if olds.keys() - news.keys():
        raise DilocoError("a bulk connection broke while its bytes were counted: bench again")
    up = sum(each.bytes_in for each in news.values()) - sum(o.bytes_in for o in olds.values())
    down = sum(each.bytes_out for each in news.values()) - sum(o.bytes_out for o in olds.values())
    return Traffic(up, down)


def lasting_traffic(before: ProbeReport, after: ProbeReport, port: int) -> Traffic:
    """What went through the connections to `port` that were there all the time: whoever asks for
    the status has one of its own, for a moment.
    """
    olds, news = _by_peer(before, port), _by_peer(after, port)
    lasting = olds.keys() & news.keys()
    return Traffic(
        sum(news[peer].bytes_in - olds[peer].bytes_in for peer in lasting),
        sum(news[peer].bytes_out - olds[peer].bytes_out for peer in lasting),
    )


def _by_peer(report: ProbeReport, port: int) -> dict[int, Connection]:
    return {each.peer_port: each for each in report.connections if each.local_port == port}


@dataclass(frozen=True, slots=True)
class Window:
    """From one reading to a later one."""

    begin: Reading
    end: Reading

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end.at_s - self.begin.at_s

    @property
    def rounds(self) -> int:
        """Rounds merged in it."""
        return self.end.status.rounds_merged - self.begin.status.rounds_merged

    @property
    def published_values(self) -> int:
        """Values of the fragment versions that were published in it."""
        old = {each.fragment: each.version for each in self.begin.status.fragments}
        return sum(
            (each.version - old[each.fragment]) * each.num_values
            for each in self.end.status.fragments
        )

    @property
    def pushed_values(self) -> int:
        """Values of the contributions that were merged in it; all fragments are of one size."""
        contributions = self.learners_grown(lambda learner: learner.contributions_merged)
        return contributions * self.published_values // max(1, self.rounds)

    def grown(self, counter: Callable[[RunStatus], int]) -> int:
        """By how much a counter of the status has grown."""
        return counter(self.end.status) - counter(self.begin.status)

    def learners_grown(self, counter: Callable[[LearnerStatus], int]) -> int:
        """By how much a counter of the learners has grown, summed over them."""
        return self.grown(lambda status: sum(counter(each) for each in status.learners))

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds by process, without those of its probe."""
        used_s = {name: self.end.cpu_s[name] - self.begin.cpu_s[name] for name in self.end.cpu_s}
        for name, probe in self.end.probes.items():
            used_s[name] -= probe.cpu_s[PROBE] - self.begin.probes[name].cpu_s[PROBE]
        return used_s
