"""A local run for a person: live picture, baselines, summary, plot and verdicts."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from fragments.errors import DilocoError
from harness.baselines import Baselines, read_answer, request
from harness.cluster import StoppedError
from harness.environment import child_environment, module
from harness.local import LocalRun, summary_path
from harness.plan import LocalPlan
from harness.plot import draw_run
from harness.processes import Command, Supervisor
from harness.report import report_view
from harness.screen import Screen
from harness.summary import Summary, verdicts
from harness.terminal import say
from harness.words import bytes_text

BASELINES_LIMIT_S = 180.0


def run_and_report(plan: LocalPlan, stop: threading.Event) -> Summary:
    """Runs `plan` to its end and leaves summary.json and loss.png beside the run directory.

    Raises:
        StoppedError: when `stop` was set before the end.
        DilocoError: when the run could not be finished, or a vital verdict is against it.
    """
    began_s = time.monotonic()
    with Screen() as screen:
        run = LocalRun(plan, stop, screen.show)
        summary = run.run()
    summary.write(summary_path(plan.out))
    if plan.baselines:
        say("the run is over; computing what to compare it with …")
        found = _baselines(plan, summary, stop)
        summary = summary.model_copy(
            update={
                "loss_bigram": found.bigram,
                "loss_alone": found.alone,
                "alone_tokens": found.alone_tokens,
                "alone_wall_s": found.alone_wall_s,
                "total_s": round(time.monotonic() - began_s, 3),
            }
        )
        summary.write(summary_path(plan.out))
    plot = plot_path(plan.out)
    draw_run(summary, run.recorder.samples, plot)
    screen.console.print(report_view(summary))
    for name, (up_bytes, down_bytes) in run.link_bytes.items():
        say(f"the link of {name} carried {bytes_text(up_bytes)} up, {bytes_text(down_bytes)} down")
    say(f"{summary_path(plan.out)}\n{plot}")
    failed = [verdict.claim for verdict in verdicts(summary) if verdict.vital and not verdict.holds]
    if failed:
        raise DilocoError("it does not hold that " + "; nor that ".join(failed))
    return summary


def _baselines(plan: LocalPlan, summary: Summary, stop: threading.Event) -> Baselines:
    """In a process of its own, ended when `stop` is set."""
    answer = plan.out / "baselines.json"
    tokens = max(1, summary.tokens // len(plan.islands))
    argv = module("harness.baselines", request(plan.spec, plan.data, tokens, answer))
    environ = child_environment(every_core=True)
    name = "baselines"
    with Supervisor() as processes:
        processes.start(Command(name, argv, plan.log(name), environ))
        while processes.running(name):
            if stop.wait(0.1):
                raise StoppedError
            if processes.now_s > BASELINES_LIMIT_S:
                raise DilocoError(f"the baselines took longer than {BASELINES_LIMIT_S:g} s")
            processes.poll()
        if processes.exit_code(name) != 0:
            processes.require_alive(name)
    return read_answer(answer)


def plot_path(out: Path) -> Path:
    """Where the plot of a local run is."""
    return out / "loss.png"
