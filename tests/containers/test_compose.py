"""`docker compose up` on the real engine, and what a data centre suffers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import pytest

from fragments.records import LearnerState, Phase, RunStatus
from tests.containers.engine import Project, learner

REGIONS = ("us-east", "eu-west", "asia-east")
CUT_S = 30.0
"""How long a region is cut off: twice what a lease lasts."""

Tell = Callable[[str], None]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Prints what has happened by when: a run of minutes shows that it moves."""
    began_s = time.monotonic()

    def say(what: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n  {time.monotonic() - began_s:5.0f} s  {what}")
            sys.stdout.flush()

    return say


@pytest.fixture
def long_run(image: str) -> Iterator[Project]:
    """A run that outlasts what is done to it, whose regions have the links of a map."""
    files = ("docker-compose.yml", "deploy/compose.map.yml")
    with Project(image, {"BUDGET_TOKENS": "1000000000"}, files) as project:
        yield project


@pytest.fixture
def short_run(image: str) -> Iterator[Project]:
    """A run of some seconds of training."""
    with Project(image, {"BUDGET_TOKENS": "100000"}) as project:
        yield project


def loss_of(status: RunStatus) -> float:
    """The newest held-out loss; infinite before there is one."""
    return status.evaluations[-1].loss if status.evaluations else float("inf")


def all_train(status: RunStatus) -> bool:
    """Does every region train?"""
    states = {one.name: one.state for one in status.learners}
    return all(states.get(name) is LearnerState.TRAINING for name in REGIONS)


@pytest.mark.timeout(900)
def test_a_run_outlives_what_a_data_centre_suffers(long_run: Project, tell: Tell) -> None:
    long_run.up()
    status = long_run.until(lambda s: all_train(s) and bool(s.evaluations), 300, "all train")
    tell("up: three regions train")
    assert "asia-east: 10 Mbit/s, 90 ms" in long_run.logs("wan")
    first = status.evaluations[0].loss
    status = long_run.until(lambda s: loss_of(s) < 0.6 * first, 240, "the loss falls")
    unit = status.evaluations[-1].unit
    tell(f"the loss has fallen from {first:.2f} to {loss_of(status):.2f} {unit}")
    a_learner_is_killed(long_run, status, "us-east", tell)
    a_region_is_cut_off(long_run, "eu-west", tell)
    the_server_is_restarted(long_run, tell)
    everything_is_taken_down(long_run, tell)


def a_learner_is_killed(project: Project, before: RunStatus, name: str, tell: Tell) -> None:
    """The others go on meanwhile, and it comes back by itself."""
    killed_s = time.monotonic()
    project.kill(name)
    status = project.until(
        lambda s: s.rounds_merged >= before.rounds_merged + 8, 60, "the others go on"
    )
    tell(f"{name} was killed: 8 rounds more were merged in {time.monotonic() - killed_s:.0f} s")
    was = learner(before, name)
    status = project.until(
        lambda s: (
            learner(s, name).joins > was.joins
            and learner(s, name).contributions_merged > was.contributions_merged
            and all_train(s)
        ),
        120,
        f"{name} returns",
    )
    assert loss_of(status) < 1.1 * loss_of(before)
    tell(f"it is back and merged after {time.monotonic() - killed_s:.0f} s")


def a_region_is_cut_off(project: Project, name: str, tell: Tell) -> None:
    """The others go on, the region itself trains on, and what it did is not lost."""
    before = project.until(all_train, 60, "all train")
    started = project.inspect(name, "{{.State.StartedAt}}")
    cut_s = time.monotonic()
    project.cut(name)
    during = project.until(
        lambda s: learner(s, name).state is LearnerState.LOST and time.monotonic() - cut_s >= CUT_S,
        90,
        f"{name} is lost",
    )
    assert during.rounds_merged > before.rounds_merged + 8
    away_s, rounds = time.monotonic() - cut_s, during.rounds_merged - before.rounds_merged
    tell(f"{name} was cut off for {away_s:.0f} s, in which {rounds} rounds were merged")
    project.mend(name)
    mended_s = time.monotonic()
    lost = learner(during, name)
    status = project.until(
        lambda s: (
            learner(s, name).contributions_merged > lost.contributions_merged and all_train(s)
        ),
        120,
        f"{name} catches up",
    )
    back = learner(status, name)
    # What it trained while nobody heard it counts: many times what it makes since its return.
    assert back.steps > lost.steps + 10
    assert project.inspect(name, "{{.State.StartedAt}}") == started
    tell(
        f"it is back and merged {time.monotonic() - mended_s:.0f} s after the link, with"
        f" {back.steps - lost.steps} steps more"
    )


def the_server_is_restarted(project: Project, tell: Tell) -> None:
    """In order, or by kill -9: it goes on with everybody, who have trained on meanwhile."""
    stops: dict[str, Callable[[], object]] = {
        "restarted": lambda: project.compose("restart", "server"),
        "killed": lambda: project.kill("server"),
    }
    for how, stop in stops.items():
        before = project.until(all_train, 60, "all train")
        began_s = time.monotonic()
        stop()
        status = project.until(goes_on_after(before), 180, f"the server that was {how} goes on")
        assert status.epoch == before.epoch  # nothing was taken back
        assert status.tokens_trained > before.tokens_trained
        assert loss_of(status) < 1.1 * loss_of(before)
        took_s = time.monotonic() - began_s
        tell(f"the server was {how}: rounds are merged again after {took_s:.0f} s")


def goes_on_after(before: RunStatus) -> Callable[[RunStatus], bool]:
    """Has another server merged more rounds, and do all train?"""
    return lambda status: (
        status.generation > before.generation
        and status.rounds_merged > before.rounds_merged
        and all_train(status)
    )


def everything_is_taken_down(project: Project, tell: Tell) -> None:
    """`down` keeps the run, and `up` goes on with it; `down --volumes` leaves nothing."""
    before = project.until(all_train, 60, "all train")
    project.compose("down")
    assert (project.left("container"), project.left("network")) == ([], [])
    tell("down")
    began_s = time.monotonic()
    project.up()
    status = project.until(goes_on_after(before), 300, "up goes on")
    assert status.run_id == before.run_id
    assert status.tokens_trained > before.tokens_trained
    tell(f"up again: it goes on after {time.monotonic() - began_s:.0f} s")
    project.compose("down", "--volumes", "--remove-orphans")
    assert [project.left(kind) for kind in ("container", "network", "volume")] == [[], [], []]
    tell("down, without a trace")


@pytest.mark.timeout(900)
def test_up_ends_with_the_run_and_says_so_ever_after(short_run: Project, tell: Tell) -> None:
    said = short_run.compose("up", "--no-build", timeout_s=420)
    assert "is finished at step" in said
    tell("up ended with the run")
    said = short_run.compose("up", "--no-build", timeout_s=420)
    assert "is there already; nothing to do" in said
    for region in REGIONS:
        assert short_run.inspect(region, "{{.State.ExitCode}} {{.RestartCount}}") == "0 0"
    assert said.count("is finished already: nothing to do") == len(REGIONS) + 1
    tell("up again said so and ended")
    assert Phase.FINISHED in said
