"""`diloco chaos`: kill, stop, slow and cut off the processes of a run, and prove that nothing is
lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from cli.measure import MeasureSettings, measure
from cli.stop import STOP_WITHIN_S
from cli.verb import Verb
from fragments.errors import DilocoError, SettingsError

if TYPE_CHECKING:
    from harness.chaos.outages import Outage
    from harness.chaos.plan import ChaosPlan
    from harness.chaos.result import ChaosResult


class ChaosSettings(MeasureSettings):
    """What happens, how often, and to what run."""

    mtbf_s: float | None = Field(
        default=None,
        gt=0,
        description="faults by the clock: mean seconds that a learner works between two faults, and"
        " the server, where --faults has one of its own",
    )
    repair_s: float = Field(
        default=10.0, gt=0, le=3600, description="seconds until such a fault is repaired"
    )
    faults: str = Field(
        default="kill,partition,slow",
        description="what such faults are: some of kill, stop, partition, slow, rate, server-kill,"
        " disk-full",
    )
    slow_factor: float = Field(
        default=3.0, gt=1, description="how many times a slow step is longer"
    )
    rate_mbit: float = Field(default=1.0, ge=0.1, description="what a link carries at fault rate")
    script: Path | None = Field(
        default=None,
        description="faults by the clock or by tokens, from a TOML file; with --mtbf-s both",
    )
    tokens: int | None = Field(
        default=None,
        gt=0,
        description="budget of a run with faults by the clock (default: 300 thousand a learner)",
    )
    checkpoint_every_s: float | None = Field(
        default=None,
        gt=0,
        description="between two checkpoints of a learner (default: 10 with faults by the clock,"
        " otherwise none is written)",
    )
    server_kills: int | None = Field(
        default=None,
        ge=0,
        le=10_000,
        description="kill -9 of the server at random instants (default: 10, or none with faults by"
        " the clock)",
    )
    learner_kills: int | None = Field(
        default=None,
        ge=0,
        le=10_000,
        description="kill -9 of a learner at random instants (default: 4, or none with faults by"
        " the clock)",
    )
    point_kills: int = Field(
        default=0,
        ge=0,
        le=100,
        description="times that the server kills itself at each named point: before and after each"
        " kind of durable write, between applying and acknowledging, in mid-snapshot",
    )
    learner_stops: int = Field(
        default=0, ge=0, le=1000, description="SIGSTOP of a learner beyond its lease, then SIGCONT"
    )
    server_away_s: float = Field(
        default=0.0, ge=0, le=3600, description="once, the server is away for so many seconds"
    )
    learners: int = Field(default=3, ge=1, le=16, description="number of learners")
    pace_s: float = Field(default=0.1, gt=0, description="least seconds a step of a learner takes")
    tokens_per_fault: int = Field(
        default=46_000,
        ge=1,
        description="trained tokens of all learners from one fault to the next; the run's budget"
        " follows from it",
    )
    containers: str | None = Field(
        default=None,
        min_length=1,
        description="run each process in a container of this image (`docker/build NAME` makes it),"
        " in a compose project of its own of which nothing stays; Linux alone",
    )
    compare: bool = Field(
        default=False, description="do the same run without faults first, and compare the loss"
    )
    seed: int = Field(default=0, ge=0, description="of the schedule; the same for the same seed")
    data: str | None = Field(
        default=None,
        min_length=1,
        description="text or JSONL files to train on; without it, some of the source of Python's"
        " standard library",
    )
    wall_limit_s: float = Field(
        default=7200.0, gt=0, description="end a run that is not finished by then"
    )


def plan_of(settings: ChaosSettings, out: Path) -> ChaosPlan:
    """What these settings ask for.

    Raises:
        SettingsError: for faults by count beside those by the clock, a kind that there is none of,
            or a script that cannot be used.
    """
    from harness.chaos.plan import TOKENS_PER_LEARNER, ChaosPlan, small_data, small_spec
    from harness.chaos.schedule import Faults
    from harness.plan import names_of

    by_clock = settings.mtbf_s is not None or settings.script is not None
    faults = Faults(
        server_kills=_given(settings.server_kills, 0 if by_clock else 10),
        point_kills=settings.point_kills,
        server_away_s=settings.server_away_s,
        learner_kills=_given(settings.learner_kills, 0 if by_clock else 4),
        learner_stops=settings.learner_stops,
    )
    if by_clock and faults != Faults():
        raise SettingsError(
            "faults by count (--server-kills, --learner-kills, --point-kills, --learner-stops,"
            " --server-away-s) hold training until each is repaired: they do not go together with"
            " --mtbf-s or --script"
        )
    _refuse_unused(settings)
    plan = ChaosPlan(
        out=out,
        spec=small_spec(),
        faults=faults,
        seed=settings.seed,
        learners=settings.learners,
        pace_s=settings.pace_s,
        tokens_per_fault=settings.tokens_per_fault,
        data=settings.data or small_data(),
        compare=settings.compare,
        image=settings.containers,
        wall_limit_s=settings.wall_limit_s,
    )
    if not by_clock:
        return replace(plan, checkpoint_every_s=settings.checkpoint_every_s)
    script, drawn = _outages(settings, names_of(plan.islands))
    tokens = settings.tokens or TOKENS_PER_LEARNER * settings.learners
    late = [each for each in script if (each.at_tokens or 0) >= tokens]
    if late:
        raise SettingsError(
            f"{settings.script}: at_tokens = {late[0].at_tokens} of {late[0].what} is not reached:"
            f" the run ends at {tokens} (--tokens)"
        )
    return replace(
        plan,
        outages=(*script, *drawn),
        scripted=len(script),
        tokens=tokens,
        checkpoint_every_s=settings.checkpoint_every_s or 10.0,
        mtbf_s=settings.mtbf_s,
        repair_s=settings.repair_s if settings.mtbf_s is not None else None,
    )


def _refuse_unused(settings: ChaosSettings) -> None:
    """SettingsError for what was given and changes nothing in this kind of run."""
    given = settings.model_fields_set
    drawn = {"repair_s", "faults", "slow_factor", "rate_mbit"}
    if settings.mtbf_s is None and (unused := sorted(drawn & given)):
        raise SettingsError(f"{_flags(unused)}: faults of that kind are drawn with --mtbf-s")
    by_clock = settings.mtbf_s is not None or settings.script is not None
    if not by_clock and settings.tokens is not None:
        raise SettingsError(
            "--tokens is the budget of a run with --mtbf-s or --script; with faults by count it"
            " follows from --tokens-per-fault"
        )
    if by_clock and "tokens_per_fault" in given:
        raise SettingsError(
            "--tokens-per-fault spaces faults by count; with --mtbf-s or --script give --tokens"
        )


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _outages(
    settings: ChaosSettings, names: Sequence[str]
) -> tuple[tuple[Outage, ...], tuple[Outage, ...]]:
    """Those of the script, and those that are drawn."""
    from harness.chaos.outages import Rates, draw_outages, parse_kinds, read_script

    kinds = parse_kinds(settings.faults)
    found = read_script(settings.script, names) if settings.script is not None else ()
    if settings.mtbf_s is None:
        return found, ()
    rates = Rates(
        settings.mtbf_s, settings.repair_s, kinds, settings.slow_factor, settings.rate_mbit
    )
    return found, draw_outages(rates, names, settings.wall_limit_s, settings.seed)


def run(settings: ChaosSettings) -> None:
    """Does it all and prints the result.

    Raises:
        SettingsError: see `plan_of`; or where no container of the image can be run.
        DilocoError: when a promise is broken, after printing the result; or when the run could not
            be finished.
    """
    # Before an earlier run in --out is put aside for this one.
    plan, stop_within_s = plan_of(settings, Path()), STOP_WITHIN_S
    if plan.image is not None:
        from harness import contained

        contained.require_image(plan.image)
        stop_within_s = contained.STOP_WITHIN_S

    def bench(out: Path, stop: threading.Event, tell: Callable[[str], None]) -> ChaosResult:
        from harness.chaos.run import Chaos

        return Chaos(replace(plan, out=out), stop, tell).run()

    def show(result: ChaosResult) -> None:
        from harness.chaos.report import report

        print(report(result))

    result = measure(settings, bench, show, stop_within_s)
    if not result.holds:
        raise DilocoError(f"a promise is broken: {result.findings[0]}")


VERB = Verb(
    name="chaos",
    summary="kill, stop, slow and cut off the processes of a run; prove that nothing is lost",
    details=(
        "Kill the processes of a run and prove that nothing is lost: a server and its learners\n"
        "run on this machine, a seeded schedule kills them with -9, stops them and keeps them\n"
        "away, they are started again, and the run goes on to its end. Then a referee compares\n"
        "the receipts that the learners kept with the server's tape, runs the tape again from the\n"
        "run's birth, and compares the digest of every version. Exit code 1 if anything that was\n"
        "acknowledged is missing, counts twice, or has other bits.\n\n"
        "A fault falls somewhere in a stretch of its own of the token budget. Where a process\n"
        "takes longer than that to come back, training is held until it has.\n\n"
        "With --mtbf-s or --script faults come by the clock instead, and nothing waits for a\n"
        "repair: what a learner loses, the run loses. Then the report also says what share of a\n"
        "run without faults was kept, where the rest went, how soon each kind of fault was over,\n"
        "and what a model of data-parallel training would have kept.\n\n"
        "With --containers the same befalls containers: a network between the regions, whose\n"
        "links are cut and narrowed, a server, and learners, each killed and stopped by the\n"
        "container engine. What they write is in --out, so the referee, a container too, judges\n"
        "as it does otherwise.\n\n"
        "Only processes and containers that the command itself has started are touched."
    ),
    examples=(
        "examples:\n"
        "  diloco chaos\n"
        "  diloco chaos --server-kills 100 --learner-kills 100 --compare --json\n"
        "  diloco chaos --server-kills 0 --learner-kills 0 --point-kills 1 --out runs/points\n"
        "  diloco chaos --server-kills 0 --learner-stops 2 --server-away-s 60\n"
        "  diloco chaos --learners 4 --mtbf-s 60 --repair-s 10 --faults kill,partition,slow\n"
        "  diloco chaos --script faults.toml --compare\n"
        "  diloco chaos --containers decoupled-diloco --mtbf-s 60 --faults kill,partition,stop\n\n"
        "a script:\n"
        "  [[faults]]\n"
        '  what = "partition"     # kill, stop, partition, slow, rate, server-kill or disk-full\n'
        '  whom = "us-east"       # a learner; not for the server\'s faults\n'
        "  at_s = 20              # after all have begun; or at_tokens = 400_000\n"
        "  for_s = 15             # slow has a factor too, and rate has mbit"
    ),
    settings=ChaosSettings,
    run=run,
)
