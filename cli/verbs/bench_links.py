"""`diloco bench links`: Decoupled DiLoCo and data-parallel training over the same thin links."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from cli.measure import MeasureSettings, measure
from cli.verb import Verb
from fragments.errors import DilocoError

if TYPE_CHECKING:
    from harness.thin.result import ThinResult


class BenchLinksSettings(MeasureSettings):
    """Over which links, how many, at what pace and for how long."""

    rates_mbit: tuple[float, ...] = Field(
        default=(1000.0, 100.0, 50.0, 20.0, 10.0, 5.0),
        description="rates of the links in Mbit/s (10^6 bits), from the widest to the thinnest",
    )
    delay_ms: float = Field(
        default=0.0, ge=0, le=1000, description="from any site to any other, one way"
    )
    learners: int = Field(default=2, ge=2, le=8, description="learners, each at a site of its own")
    pace_s: float = Field(
        default=0.09, gt=0, le=10, description="seconds that the computing of a step is given"
    )
    sync_interval: int = Field(default=24, ge=1, description="H, of Decoupled")
    fragments: int = Field(default=8, ge=1, le=64, description="P, of Decoupled")
    window_s: float = Field(
        default=20.0, ge=1, le=600, description="seconds that are measured at each rate"
    )
    program: dict[str, Any] = Field(
        default_factory=dict, description="settings of the reference model, such as width=128"
    )


def run(settings: BenchLinksSettings) -> None:
    """Measures, prints, and writes links.json, links.md and links.png to OUT.

    Raises:
        SettingsError: where no network namespaces can be made, or rates do not fall.
        DilocoError: when the claim does not hold, after printing it.
    """

    def bench(out: Path, stop: threading.Event, tell: Callable[[str], None]) -> ThinResult:
        from harness.thin.plan import PROGRAM, ThinPlan
        from harness.thin.plot import draw_thin
        from harness.thin.report import report
        from harness.thin.run import ThinBench

        plan = ThinPlan(
            out=out,
            learners=settings.learners,
            rates_mbit=settings.rates_mbit,
            delay_ms=settings.delay_ms,
            pace_s=settings.pace_s,
            sync_interval=settings.sync_interval,
            fragments=settings.fragments,
            window_s=settings.window_s,
            program=PROGRAM | settings.program,
        )
        result = ThinBench(plan, stop, tell).run()
        (out / "links.json").write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (out / "links.md").write_text(report(result) + "\n", encoding="utf-8")
        draw_thin(result, out / "links.png")
        return result

    def show(result: ThinResult) -> None:
        from harness.thin.report import report

        print(report(result))

    result = measure(settings, bench, show)
    if not result.holds:
        raise DilocoError("what is claimed of thin links does not hold; the table says by how much")


VERB = Verb(
    name="bench links",
    summary="measure what thin links do to Decoupled DiLoCo and to data-parallel training",
    details=(
        "Measure tokens a second of Decoupled DiLoCo and of data-parallel training over the same\n"
        "thin links, with one model and one batch. Every learner, and the server, is at a site of\n"
        "its own: a network namespace whose traffic the kernel holds to the rate, both ways.\n"
        "First data-parallel training (jax.distributed with Gloo, gradients exchanged at 16 bits\n"
        "a value in every step) goes through all rates, then a server and its learners do.\n\n"
        "A step's computing takes --pace-s: less is computed, and the rest slept, so that not\n"
        "this machine's cores are compared. Utilisation is that time over the mean step. The\n"
        "claim: on the thinnest link at which Decoupled keeps 95% of its utilisation, with its\n"
        "rounds on schedule, it trains at least 20 times the tokens a second, at a pace for\n"
        "which data-parallel is at least 50% utilised on the widest link. Exit code 1 if not.\n\n"
        "With --out, links.json, links.md and links.png are kept. Takes some 7 minutes; Linux, as\n"
        "root (nothing of the machine's own network is touched), with ip, tc, nsenter, unshare."
    ),
    examples=(
        "examples:\n"
        "  diloco bench links --out runs/links\n"
        "  diloco bench links --rates-mbit 1000 10 --window-s 10 --json\n"
        "  diloco bench links --rates-mbit 1000 100 2 --delay-ms 40 --pace-s 0.5\n\n"
        "Far apart, a step of data-parallel takes two round trips and more on any link: at the\n"
        "default pace it is less than 50% utilised, and nothing can be claimed.\n\n"
        "exit codes: 1 the claim does not hold, 2 no namespaces can be made here"
    ),
    settings=BenchLinksSettings,
    run=run,
)
