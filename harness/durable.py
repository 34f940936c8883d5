"""What the journal costs: pushes a second with it and without, and how soon a server is back."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, ConfigDict

from fragments.codec import Codec
from fragments.layout import Layout
from fragments.payload import Payload
from fragments.records import (
    PROTOCOL_VERSION,
    Contribution,
    ContributionKey,
    Hello,
    Lease,
    Report,
    Role,
    Version,
)
from fragments.runspec import RunSpec
from harness.cluster import Cluster, StoppedError
from harness.plan import SERVER
from harness.processes import Supervisor
from harness.wire.plan import WirePlan
from services.client.outer import GrpcLink
from services.client.status import fetch_status

BOUND = 0.85
"""Least share of the pushes without a journal that there are to be with it."""

RECOVERY_BOUND_S = 15.0
_FSYNCS = 50
_TOKENS = 64


class DurableResult(BaseModel):
    """What was measured. Rates in pushes a second, over all pusher threads together.

    `ratio_median`: of the pairs' ratios, with the journal over without. `fsync_ms`: median time to
    write and sync a payload's bytes at the end of a file on that disk. `recovery_s`: from starting
    a server that was killed to its first answer; it then merged `recovery_merges` rounds again.
    """

    params: int
    payload_bytes: int
    pushers: int
    pushes: int
    with_journal_per_s: list[float]
    without_per_s: list[float]
    ratio_median: float
    fsync_ms: float
    recovery_s: float
    recovery_merges: int
    bound: float = BOUND
    recovery_bound_s: float = RECOVERY_BOUND_S

    model_config = ConfigDict(frozen=True)

    @property
    def holds(self) -> bool:
        """Whether both are within their bounds."""
        return self.ratio_median >= self.bound and self.recovery_s <= self.recovery_bound_s


@dataclass(slots=True)
class DurableBench:
    """One bench. Leaves no process behind, however it ends. Call `run` once.

    Args:
        out: where run directories and logs go.
        params: of the model.
        pairs: of measurements with and without the journal, which take turns in going first.
        pushers: learners that push at once, each one fragment after the other.
        merges: rounds that are merged before the server is killed.
        limit_s: longest wait for any part of it.
    """

    out: Path
    params: int
    pairs: int
    pushers: int
    merges: int
    limit_s: float
    stop: threading.Event
    tell: Callable[[str], None]

    def run(self) -> DurableResult:
        """Measures everything. Raises StoppedError, SettingsError, DilocoError."""
        plan = WirePlan(self.out, self.params, self.pushers)
        plan.require_room()
        with Supervisor() as processes:
            born = Cluster(self.out / "born", plan.spec, None, self.stop, processes)
            born.out.mkdir(parents=True)
            self.tell(f"a run of {self.params:,} parameters")
            born.make_run()
            payloads = _payloads(born.run_dir, plan.spec)
            rates: dict[bool, list[float]] = {True: [], False: []}
            for pair in range(self.pairs):
                for journal in (True, False) if pair % 2 else (False, True):
                    rates[journal].append(self._rate(born, journal, payloads))
                a, b = rates[True][-1], rates[False][-1]
                self.tell(f"pair {pair + 1} of {self.pairs}: {a:.1f} with, {b:.1f} without")
            fsync_ms = _fsync_ms(self.out / "fsync", payloads[0].data)
            recovery_s, merges = self._recovery(born, payloads)
        ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
        return DurableResult(
            params=self.params,
            payload_bytes=len(payloads[0].data),
            pushers=self.pushers,
            pushes=self.pushers * len(payloads),
            with_journal_per_s=[round(rate, 2) for rate in rates[True]],
            without_per_s=[round(rate, 2) for rate in rates[False]],
            ratio_median=round(statistics.median(ratios), 4),
            fsync_ms=round(fsync_ms, 2),
            recovery_s=round(recovery_s, 2),
            recovery_merges=merges,
        )

    def _rate(self, born: Cluster, journal: bool, payloads: list[Payload]) -> float:
        """Pushes a second to a server that has just started, all learners' fragments once."""
        flags = () if journal else ("--no-journal",)
        with Supervisor() as processes:
            cluster = self._copy(born, f"journal-{journal}", processes, flags)
            with ThreadPoolExecutor(self.pushers) as pool, closing(_Pushers(cluster, self)) as all_:
                began_s = time.monotonic()
                for done in [pool.submit(all_.push, n, payloads, 0) for n in range(self.pushers)]:
                    done.result()
                took_s = time.monotonic() - began_s
            processes.kill(SERVER, "measured")
        shutil.rmtree(cluster.out)
        return self.pushers * len(payloads) / took_s

    def _recovery(self, born: Cluster, payloads: list[Payload]) -> tuple[float, int]:
        """Seconds that a killed server takes to answer again, and merges that it did anew."""
        with Supervisor() as processes:
            cluster = self._copy(born, "recovery", processes, ())
            with ThreadPoolExecutor(2) as pool, closing(_Pushers(cluster, self)) as all_:
                merged = version = 0
                while merged < self.merges:
                    for done in [pool.submit(all_.push, n, payloads, version) for n in range(2)]:
                        done.result()
                    version += 1
                    merged = all_.step_until(version * len(payloads))
                    self.tell(f"{merged} rounds merged; killed once {self.merges} are")
            processes.kill(SERVER, "to see it come back")
            cluster.until(lambda: not processes.running(SERVER), self.limit_s, "the kill")
            (cluster.run_dir / "address.json").unlink(missing_ok=True)
            began_s = time.monotonic()
            fetch_status(cluster.serve())
            took_s = time.monotonic() - began_s
            again = _merges_again(cluster.log(SERVER))
        self.tell(f"back after {took_s:.1f} s, with {again} merges done anew")
        return took_s, again

    def _copy(
        self, born: Cluster, name: str, processes: Supervisor, flags: tuple[str, ...]
    ) -> Cluster:
        """The newborn run, served from a directory of its own."""
        cluster = replace(born, out=self.out / name, processes=processes, serve_flags=flags)
        # Links do: no file of a run directory is ever written to again.
        shutil.copytree(born.run_dir, cluster.run_dir, copy_function=os.link)
        cluster.serve()
        return cluster


class _Pushers:
    """Names that have joined and push without being asked."""

    def __init__(self, cluster: Cluster, bench: DurableBench) -> None:
        self._bench = bench
        self._address = cluster.address
        self._links = [GrpcLink(cluster.address) for _ in range(bench.pushers)]
        run = self._links[0].describe()
        self._epoch = run.epoch
        self._leases = [
            self._join(link, number, run.run_id, run.layout_digest)
            for number, link in enumerate(self._links)
        ]
        self._lines = [
            link.open_control(lease, lambda _: None, lambda: None)
            for link, lease in zip(self._links, self._leases, strict=True)
        ]
        self._step = 0

    def _join(self, link: GrpcLink, number: int, run_id: str, layout_digest: str) -> Lease:
        name = f"learner-{number + 1}"
        hello = Hello(PROTOCOL_VERSION, run_id, layout_digest, name, Role.LEARNER, name)
        return link.join(hello).lease

    def push(self, number: int, payloads: list[Payload], version: int) -> None:
        """One contribution to every fragment, on the base of that version."""
        for fragment, payload in enumerate(payloads):
            if self._bench.stop.is_set():
                raise StoppedError
            base = Version(self._epoch, version)
            key = ContributionKey(self._leases[number].learner, fragment, base)
            contribution = Contribution(key, base, 1, _TOKENS, version, version + 1, payload)
            self._links[number].push(self._leases[number], contribution)

    def step_until(self, rounds: int) -> int:
        """All make steps until so many rounds are merged from what waits; how many there are."""
        deadline_s = time.monotonic() + self._bench.limit_s
        while time.monotonic() < deadline_s:
            self._step += 1
            for line in self._lines:
                line.report(Report(self._step, self._step * _TOKENS, self._step))
            if self._bench.stop.wait(0.02):
                raise StoppedError
            if self._step % 10 == 0:
                merged = fetch_status(self._address).rounds_merged
                if merged >= rounds:
                    return merged
        return fetch_status(self._address).rounds_merged

    def close(self) -> None:
        """Let the server go."""
        for line in self._lines:
            line.close()
        for link in self._links:
            link.close()


def _payloads(run: Path, spec: RunSpec) -> list[Payload]:
    """Gaussian pseudo-gradients, one a fragment."""
    layout = Layout.from_json((run / "layout.json").read_text())
    codec, draw = Codec.of(spec.codec), np.random.default_rng(0)
    payloads = []
    for part in layout.fragments:
        value_BxN = np.zeros((layout.rows_padded, layout.block), np.float32)
        for slot in part.slots:
            flat = value_BxN[slot.row_start : slot.row_stop].reshape(-1)
            flat[: slot.size] = draw.normal(size=slot.size) * 1e-4
        valid_B = np.full(layout.rows_padded, layout.block, np.int32)
        reduced = codec.reduce(
            jnp.asarray(value_BxN), jnp.asarray(valid_B), spec.codec.step_fraction_up
        )
        payloads.append(codec.encode(part, reduced.codes, reduced.step_bits))
    return payloads


def _fsync_ms(path: Path, data: bytes) -> float:
    times = []
    with path.open("wb", buffering=0) as file:
        for _ in range(_FSYNCS):
            began_s = time.perf_counter()
            file.write(data)
            os.fsync(file.fileno())
            times.append(1e3 * (time.perf_counter() - began_s))
    path.unlink()
    return statistics.median(times)


def _merges_again(log: Path) -> int:
    """What the server's log says of its last recovery."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return next(int(line["merges"]) for line in reversed(lines) if line.get("event") == "recovered")
