"""What runs of `diloco bench faults` consist of, and how long they are likely to take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fragments.errors import SettingsError
from fragments.overlay import overlay
from fragments.policies import policy_settings
from fragments.runspec import RunSpec
from harness.chaos.breaker import Befell
from harness.chaos.model import by_papers_rule
from harness.chaos.outages import OutageKind, Rates, downtimes, draw_outages
from harness.chaos.plan import ChaosPlan, small_data, small_spec
from harness.chaos.schedule import Faults
from harness.dataparallel.job import DataParallelJob
from harness.dataparallel.killed import Downtimes
from harness.link import CLEAR, LinkShape
from harness.plan import names_of

_AROUND_S = 40.0
"""A run's start, and its judgement."""

_SYNCHRONOUS_SHARE = 0.8
"""Of what Decoupled DiLoCo keeps, for the estimate of how long it takes."""

WAYS = (
    ("Decoupled DiLoCo", "decoupled/chaos.json"),
    ("data-parallel training", "data-parallel/job.json"),
    ("synchronous DiLoCo", "synchronous/chaos.json"),
)
"""In the order in which they run under a schedule, and where each leaves what it came to."""


def rates_spec() -> RunSpec:
    """The run of `diloco chaos`, synchronised so seldom that what is on its way costs little."""
    return small_spec().model_copy(
        update={"sync_interval": RunSpec(sync_interval=32).sync_interval}  # type: ignore[arg-type]  # a plain H; the model parses it
    )


@dataclass(frozen=True, slots=True)
class FaultRatesPlan:
    """What to run, `mtbfs_s` one after another. `tokens`: that each run trains but the
    data-parallel ones, which take as long as Decoupled DiLoCo. `restart_s`: from a repair to the
    next step, for all of them. `seeds`: schedules at each rate, from `seed` on. `rate_mbit`: what
    the link of each learner carries each way, for all of them; None for this machine's loopback.
    `delay_ms`: of those links, one way: to the server, and from any worker to any other.

    Raises:
        SettingsError: for what nothing could be concluded from: one learner, an MTBF given twice,
            runs that are over before a killed learner is back, kills of which nothing is left.
    """

    out: Path
    mtbfs_s: tuple[float, ...] = (400.0, 180.0, 80.0)
    repair_s: float = 10.0
    restart_s: float = 12.0
    learners: int = 4
    pace_s: float = 0.25
    tokens: int = 500_000
    checkpoint_every_s: float = 10.0
    seed: int = 1
    seeds: int = 1
    rate_mbit: float | None = None
    delay_ms: float = 0.0
    wall_limit_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.learners < 2:
            raise SettingsError("--learners 1: with nobody beside it there is nothing to compare")
        twice = sorted({each for each in self.mtbfs_s if self.mtbfs_s.count(each) > 1})
        if twice:
            raise SettingsError(f"--mtbf-s: {twice[0]:g} is there twice; --seeds repeats a rate")
        away_s = self.repair_s + self.restart_s
        if self._calm_s <= away_s:
            raise SettingsError(
                f"--tokens {self.tokens}: a run of {self._calm_s:.3g} s is over before a learner"
                f" that was killed is back ({away_s:g} s): give more, or a shorter --repair-s and"
                " --restart-s"
            )
        for mtbf_s, seed in self.schedules:
            if self._rule(self.decoupled(mtbf_s, seed), self._calm_s) <= 0:
                raise SettingsError(
                    f"--mtbf-s {mtbf_s:g}: so often that by the paper's rule nothing is kept"
                )

    def undisturbed(self) -> ChaosPlan:
        """Decoupled DiLoCo without faults."""
        return ChaosPlan(
            out=self.out / "undisturbed",
            spec=rates_spec(),
            faults=Faults(),
            seed=self.seed,
            learners=self.learners,
            pace_s=self.pace_s,
            data=small_data(),
            wall_limit_s=self.wall_limit_s,
            tokens=self.tokens,
            checkpoint_every_s=self.checkpoint_every_s,
            restart_s=self.restart_s,
            link=LinkShape(self.rate_mbit, self.delay_ms / 1000) if self.rate_mbit else CLEAR,
        )

    def decoupled(self, mtbf_s: float, seed: int) -> ChaosPlan:
        """The same under a schedule of kills."""
        calm = self.undisturbed()
        rates = Rates(mtbf_s, self.repair_s, (OutageKind.KILL,))
        outages = draw_outages(rates, names_of(calm.islands), self.wall_limit_s, seed)
        return replace(
            calm,
            out=self._place(mtbf_s, seed) / "decoupled",
            seed=seed,
            outages=outages,
            mtbf_s=mtbf_s,
            repair_s=self.repair_s,
        )

    def synchronous(self, mtbf_s: float, seed: int) -> ChaosPlan:
        """Synchronous DiLoCo (K=M) under that schedule, for as many tokens."""
        ours = self.decoupled(mtbf_s, seed)
        given = ours.spec.model_dump(exclude_unset=True) | {"max_learners": self.learners}
        spec = RunSpec.model_validate(overlay(given, policy_settings("diloco", self.learners)))
        return replace(ours, out=self._place(mtbf_s, seed) / "synchronous", spec=spec)

    def data_parallel(self, mtbf_s: float, seed: int) -> tuple[DataParallelJob, Downtimes]:
        """Data-parallel training of that model, and when which of its workers is killed."""
        ours = self.decoupled(mtbf_s, seed)
        job = DataParallelJob(
            self._place(mtbf_s, seed) / "data-parallel",
            ours.spec.model_copy(update={"budget_tokens": self.tokens}),
            tuple(names_of(ours.islands)),
            self.pace_s,
            data=ours.data,
            checkpoint_every_steps=max(1, round(self.checkpoint_every_s / self.pace_s)),
        )
        return job, downtimes(ours.outages)

    def _place(self, mtbf_s: float, seed: int) -> Path:
        return self.out / _place_name(mtbf_s, seed)

    @property
    def schedules(self) -> list[tuple[float, int]]:
        """MTBF and seed of each, from the mildest on."""
        seeds = range(self.seed, self.seed + self.seeds)
        return [(mtbf_s, n) for mtbf_s in sorted(self.mtbfs_s, reverse=True) for n in seeds]

    @property
    def runs_of_schedules(self) -> list[tuple[str, str]]:
        """All but the undisturbed one, in order: what each is, and where in `out` its result is."""
        return [
            (f"{schedule_words(mtbf_s, seed)}: {way}", f"{_place_name(mtbf_s, seed)}/{name}")
            for mtbf_s, seed in self.schedules
            for way, name in WAYS
        ]

    @property
    def num_runs(self) -> int:
        """All of them."""
        return 1 + 3 * len(self.schedules)

    @property
    def expected_s(self) -> float:
        """How long all runs are likely to take, on a machine that has nothing else to do."""
        calm_s = self._calm_s
        whole_s = calm_s + self.num_runs * _AROUND_S
        for mtbf_s, seed in self.schedules:
            ours_s = calm_s / self._rule(self.decoupled(mtbf_s, seed), calm_s)
            whole_s += ours_s * (2 + 1 / _SYNCHRONOUS_SHARE)
        return whole_s

    @property
    def _calm_s(self) -> float:
        """How long a run takes without faults, at its pace."""
        settings = rates_spec().program.settings
        tokens_per_step = int(settings["seq_len"]) * int(settings["batch_size"])
        return self.tokens / tokens_per_step / self.learners * self.pace_s

    def _rule(self, plan: ChaosPlan, span_s: float) -> float:
        kills = downtimes(plan.outages)
        befell = [
            Befell(outage, kill.at_s, kill.at_s + kill.down_s)
            for outage, kill in zip(plan.outages, kills, strict=True)
        ]
        names = names_of(plan.islands)
        return by_papers_rule(befell, names, span_s, self.restart_s, self.checkpoint_every_s)


def schedule_words(mtbf_s: float, seed: int) -> str:
    """What befalls a run."""
    return f"a kill every {mtbf_s:g} s of a learner, seed {seed}"


def _place_name(mtbf_s: float, seed: int) -> str:
    return f"mtbf-{mtbf_s:g}-seed-{seed}"
