"""`diloco run`: a whole run of several islands on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from cli.keys import VerbSettings
from cli.stop import STOP_WITHIN_S, stop_on_signal
from cli.verb import Verb
from cli.verbs.init import HIDDEN
from fragments.errors import SettingsError
from fragments.overlay import overlay
from fragments.policies import Policy, spec_of
from fragments.runspec import RunSpec

if TYPE_CHECKING:
    from harness.plan import Island, LocalPlan
    from harness.presets import Preset


class RunSettings(VerbSettings, RunSpec):
    """How many islands, how fast, what happens to them; and all settings of the run."""

    hidden_keys: ClassVar[frozenset[str]] = HIDDEN

    out: Path = Field(description="directory for the run, its logs, summary and plot")
    preset: str | None = Field(
        default=None, description="start from the settings of a preset, such as demo"
    )
    policy: Policy | None = Field(
        default=None,
        description="settings of a known algorithm, over the preset's and under those that are"
        " given: decoupled (the defaults), diloco (synchronous) or streaming",
    )
    data: str | None = Field(
        default=None,
        min_length=1,
        description="text or JSONL files to train on: a file, a directory with all below it, or a"
        " glob; without it, the source of Python's standard library",
    )
    learners: Annotated[int, Field(ge=1, le=16)] = Field(
        default=3, description="number of learners"
    )
    map_: Path | None = Field(
        default=None,
        alias="map",
        description="TOML file with a table [regions.NAME] for each learner: rate_mbit and delay_ms"
        " of its link to the server, and its speed; instead of --learners and --slow-factor",
    )
    containers: str | None = Field(
        default=None,
        min_length=1,
        description="run each process in a container of this image (`docker/build NAME` makes it),"
        " in a compose project of its own of which nothing stays; Linux alone, without --baselines",
    )
    pace_s: float | None = Field(
        default=None,
        ge=0,
        description="least seconds a step of a learner takes, so that not the cores of this machine"
        " are measured; 0 for as fast as it can (default: the preset's, otherwise 0)",
    )
    slow_factor: float = Field(
        default=3.0, ge=1, description="the last learner is so many times slower; 1 for none"
    )
    lead_share: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="the first learner begins alone, and the others are started when it has trained"
        " this share of the budget (default: the preset's, otherwise 0)",
    )
    kill: tuple[str, ...] = Field(
        default=(), description="NAME@STEP: kill that learner (-9) at its step, then start it again"
    )
    evaluate_every_s: float = Field(
        default=2.0, gt=0, description="seconds between two evaluations"
    )
    wall_limit_s: float = Field(
        default=900.0, gt=0, description="end a run that is not finished by then"
    )
    max_restarts: int = Field(default=3, ge=0, description="restarts of a learner that has died")
    checkpoint_every_s: float = Field(
        default=10.0,
        gt=0,
        description="least seconds from one checkpoint of a learner to the next; they are in"
        " OUT/checkpoints",
    )
    baselines: bool = Field(
        default=True,
        description="compute a bigram model and one learner alone afterwards, to compare with",
    )


def run(settings: RunSettings) -> None:
    """Runs it, prints the summary, and writes OUT/summary.json and OUT/loss.png.

    Raises:
        SettingsError: see `make_plan`; or where no container of the image can be run.
        RunDirectoryError: when OUT holds something that is no earlier local run.
        DilocoError: when the run could not be finished, or ended with unequal weights.
    """
    from harness.cluster import StoppedError
    from harness.outdir import prepare
    from harness.show import run_and_report

    plan = make_plan(settings)
    stop_within_s = STOP_WITHIN_S
    if plan.image is not None:
        from harness import contained

        contained.require_image(plan.image)
        stop_within_s = contained.STOP_WITHIN_S
    previous = prepare(plan.out)
    if previous is not None:
        print(f"the run that was in {plan.out} is now in {previous}")
    with stop_on_signal(within_s=stop_within_s) as stop:
        try:
            run_and_report(plan, stop)
        except StoppedError:
            print(f"stopped before the end; what there is of the run is in {plan.out}")


def make_plan(settings: RunSettings) -> LocalPlan:
    """The plan: the preset's settings, overridden by the policy's, and both by those given.

    Raises:
        SettingsError: for an unknown preset, a kill of nobody, a slow learner without a pace, or a
            map that makes no sense.
    """
    from harness.drill import parse_kills
    from harness.plan import LocalPlan, names_of
    from harness.presets import preset

    base: Preset | None = preset(settings.preset) if settings.preset else None
    given = settings.model_dump(exclude_unset=True)
    weak = base.spec.model_dump(exclude_unset=True) if base else {}
    pace_s = settings.pace_s
    if pace_s is None:
        pace_s = base.pace_s if base else 0.0
    lead_share = settings.lead_share
    if lead_share is None:
        lead_share = base.lead_share if base else 0.0
    islands = _islands(settings, pace_s)
    # As many data shards as there are learners: a shard that nobody has is never trained on.
    own = {"max_learners": len(islands)}
    return LocalPlan(
        out=settings.out,
        spec=spec_of(given, settings.policy, overlay(own, weak)),
        islands=islands,
        data=settings.data,
        lead_share=lead_share,
        kills=parse_kills(settings.kill, names_of(islands)),
        evaluate_every_s=settings.evaluate_every_s,
        wall_limit_s=settings.wall_limit_s,
        max_restarts=settings.max_restarts,
        checkpoint_every_s=settings.checkpoint_every_s,
        # Computed here, they might train on another Python's source than the containers.
        baselines=settings.baselines and settings.containers is None,
        image=settings.containers,
    )


def _islands(settings: RunSettings, pace_s: float) -> tuple[Island, ...]:
    """The learners: those of the map, or so many of which the last one is slow."""
    from harness.plan import islands_of, make_islands
    from harness.regions import load_map

    given = settings.model_fields_set
    if settings.map_ is not None:
        if both := sorted({"learners", "slow_factor"} & given):
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in both)
            raise SettingsError(
                f"the map says who the learners are and how fast: leave out {flags}"
            )
        return islands_of(load_map(settings.map_), pace_s)
    slow_factor = settings.slow_factor
    if pace_s == 0 and "slow_factor" not in given:
        slow_factor = 1.0
    return make_islands(settings.learners, pace_s, slow_factor)


VERB = Verb(
    name="run",
    summary="run several islands on this machine, start to finish",
    details=(
        "Run several islands on this machine, each a process of its own: one outer server, its\n"
        "learners and an evaluator that talk over loopback. Shows the run live, ends by itself at\n"
        "the token budget, and leaves OUT/summary.json, OUT/loss.png, OUT/logs/ and the run\n"
        "directory OUT/run. An earlier run in OUT is kept as OUT.previous.\n\n"
        "With --map the learners are far apart: a TOML file has a table for each, such as\n"
        "  [regions.us-east]\n"
        "  rate_mbit = 20     # Mbit/s (10^6 bits) each way; left out: no bound\n"
        "  delay_ms = 40      # one way\n"
        "  speed = 0.5        # a step takes --pace-s divided by this\n\n"
        "With --containers the same run, map and all, is a compose project. OUT/links/map.toml is\n"
        "then the map as it is at the moment: what is changed there, `cut = true` too, takes\n"
        "effect at once."
    ),
    examples=(
        "examples:\n"
        "  diloco run --out runs/demo --preset demo\n"
        "  diloco run --out runs/demo --preset demo --kill us-east@150\n"
        "  diloco run --out runs/mine --data 'texts/*.txt' --budget-tokens 500000 --learners 2\n"
        "  diloco run --out runs/far --preset demo --map map.toml\n"
        "  diloco run --out runs/far --preset demo --map map.toml --containers decoupled-diloco"
    ),
    settings=RunSettings,
    run=run,
)
