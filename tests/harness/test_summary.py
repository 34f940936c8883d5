"""From recorded snapshots to summary, verdicts, views and picture."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fragments.errors import DilocoError, SettingsError
from fragments.records import LearnerState, Phase
from harness import recorder as recorder_module
from harness.drill import Drill, parse_kills
from harness.plot import draw_run
from harness.processes import Event, EventKind
from harness.recorder import Recorder
from harness.report import report_view
from harness.status import status_json
from harness.summary import Circumstances, Summary, summarize, verdicts
from harness.view import status_line, status_view
from tests.harness.statuses import DIGEST, NAMES, evaluation, learner, status

PACES = dict(zip(NAMES, (0.66, 0.22, 0.22), strict=True))
KILL = [
    Event(12.0, "us-east", EventKind.KILLED, 7, None, "kill -9 at its step 60"),
    Event(12.1, "us-east", EventKind.DIED, 7, -9, "killed by the drill"),
    Event(12.6, "us-east", EventKind.RESTARTED, 8, None, "restart 1"),
    Event(16.5, "us-east", EventKind.REJOINED, 8, None, "join 2"),
]


def recorded(last_step: int = 100) -> Recorder:
    """A run of 0.2 s a step that stands still for two seconds at either end."""
    recorder = Recorder()
    for at_s in (0.0, 1.0, 2.0):
        recorder.record(status(0), at_s)
    for step in range(4, last_step, 4):
        recorder.record(status(step), 2.0 + 0.2 * step)
    end_s = 2.0 + 0.2 * last_step
    recorder.record(status(last_step), end_s)
    recorder.record(status(last_step, phase=Phase.FINISHED), end_s + 2.0)
    return recorder


def summed(recorder: Recorder, events: list[Event] | None = None) -> Summary:
    circumstances = Circumstances(PACES, {"us-east": 1} if events else {}, events or [], 30.0)
    return summarize(recorder, circumstances)


def test_the_summary_holds_what_was_recorded(tmp_path: Path) -> None:
    summary = summed(recorded(), KILL)
    assert summary.finished
    assert (summary.loss_first, summary.loss_last) == (8.0, 3.0)
    assert summary.loss_unit == "bits per byte"
    assert summary.wall_s == pytest.approx(20.0)
    assert summary.rounds == 25
    assert summary.tokens == 1024 * (33 + 100 + 100)
    assert summary.weights_digest == DIGEST
    assert summary.digests_equal
    assert summary.restarts == 1
    slow, west, _ = summary.learners
    assert (slow.name, slow.steps, slow.pace_s) == ("asia-slow", 33, 0.66)
    assert (west.contributions_merged, west.tokens_merged) == (12, 51_200)
    assert [event.kind for event in summary.events] == ["killed", "died", "restarted", "rejoined"]

    path = tmp_path / "summary.json"
    summary.write(path)
    assert Summary.read(path) == summary
    asked_for = {
        "loss_first", "loss_last", "loss_unit", "tokens", "rounds", "learners", "bytes_up",
        "bytes_down", "wall_s", "weights_digest", "loss_bigram", "loss_alone",
    }  # fmt: skip
    written = json.loads(path.read_text())
    assert asked_for <= written.keys()
    assert {"name", "steps", "contributions_merged", "tokens_merged", "wait_share", "digest"} <= (
        written["learners"][0].keys()
    )


def test_a_learner_that_is_back_at_the_end_has_the_step_time_of_its_last_step() -> None:
    """A process that has made no step tells of no time."""
    recorder = recorded()
    back = learner("eu-west", 100, joins=2, step_s=0.0)
    recorder.record(status(100, phase=Phase.FINISHED, learners=(back,)), 30.0)
    (one,) = summed(recorder).learners
    assert (one.name, one.step_s) == ("eu-west", 0.22)


def test_a_run_without_evaluation_or_status_is_told_as_such() -> None:
    recorder = Recorder()
    with pytest.raises(DilocoError, match="no status"):
        summed(recorder)
    recorder.record(status(4, evaluations=()), 1.0)
    summary = summed(recorder)
    assert summary.loss_first is None
    assert not summary.finished
    Console(file=None, quiet=True).print(report_view(summary))


def test_evaluations_are_kept_though_a_status_holds_few() -> None:
    recorder = Recorder()
    for step in (0, 10, 20):
        held = (evaluation(max(0, step - 10), 5.0), evaluation(step, 4.0))
        recorder.record(status(step, evaluations=held), float(step))
    assert [one.global_step for one in recorder.evaluations] == [0, 10, 20]


def test_memory_of_a_long_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_SAMPLES", 50)
    recorder = recorded(last_step=400)
    assert len(recorder.samples) <= 50
    assert recorder.samples[-1].at_s > recorder.samples[0].at_s


def test_a_second_join_is_noticed_once() -> None:
    recorder = Recorder()
    again = (learner("us-east", 9, joins=2),)
    assert recorder.record(status(8), 1.0) == []
    assert [one.name for one in recorder.record(status(9, learners=again), 2.0)] == ["us-east"]
    assert recorder.record(status(9, learners=again), 3.0) == []


def test_verdicts_tell_what_holds_and_what_does_not() -> None:
    good = summed(recorded(), KILL).model_copy(update={"loss_bigram": 3.6, "loss_alone": 3.2})
    assert all(verdict.holds for verdict in verdicts(good))
    assert len(verdicts(good)) == 6
    assert "back after 4.4 s" in verdicts(good)[-1].figures

    never_back = summed(recorded(), KILL[:2])
    assert [v.claim for v in verdicts(never_back) if not v.holds] == [
        "us-east rejoined after its kill -9"
    ]
    worse = good.model_copy(update={"loss_bigram": 2.0, "loss_alone": 2.5})
    lost = [verdict for verdict in verdicts(worse) if not verdict.holds]
    assert len(lost) == 2
    assert not any(verdict.vital for verdict in lost)


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"weights_digest": "cd" * 32}, "the weights are the same"),
        ({"contributions_merged": 0}, "every learner contributed"),
        ({"wait_share": 0.02}, "no learner waited"),
    ],
)
def test_one_learner_that_differs_is_found(changes: dict[str, object], claim: str) -> None:
    recorder = recorded()
    odd = (learner("asia-slow", 33, **changes), learner("eu-west", 100))
    recorder.record(status(100, phase=Phase.FINISHED, learners=odd), 30.0)
    assert [v.claim.startswith(claim) for v in verdicts(summed(recorder)) if not v.holds] == [True]


def test_the_picture_is_a_png_of_the_promised_size(tmp_path: Path) -> None:
    recorder = recorded()
    summary = summed(recorder, KILL).model_copy(update={"loss_bigram": 3.6, "loss_alone": 3.2})
    for name, samples in (("full.png", recorder.samples), ("bare.png", [])):
        path = tmp_path / name
        draw_run(summary, samples, path)
        head = path.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", head[16:24])
        assert (width, abs(height - 760) <= 1) == (1800, True)
    assert not list(tmp_path.glob("*.part"))


def test_views_tell_the_state_of_a_run() -> None:
    lost = replace(learner("us-east", 60), state=LearnerState.LOST, silent_s=21.0, joins=2)
    seen = status(64, learners=(learner("eu-west", 64), lost))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(status_view(seen, [8.0, 7.0, 5.0], KILL))
    picture = capture.get()
    assert "…" not in picture
    assert "1 live learner " in picture
    for words in ("made-up", "training", "eu-west", "lost 21 s", "killed", "H 8 steps"):
        assert words in picture
    line = status_line(seen)
    assert "\n" not in line
    assert "step 64" in line
    assert "us-east lost 60" in line


def test_views_tell_in_full_why_nothing_can_be_stored() -> None:
    reason = "the server cannot store contributions (No space left on device): training goes on"
    seen = replace(status(64), stalled=reason)
    for width in (110, 60):
        console = Console(width=width)
        with console.capture() as capture:
            console.print(status_view(seen))
        words = capture.get().replace("│", " ").split()
        assert " ".join(reason.split()) in " ".join(words)
        assert "stalled" in words
    assert "stalled: step 64" in status_line(seen)
    assert json.loads(status_json(seen))["stalled"] == seen.stalled


def test_views_tell_caps_use_and_whose_link_is_outrun() -> None:
    full = learner("eu-west", 64, cap_up_mbit=10.0, use_up_mbit=9.83, use_down_mbit=4.21)
    full = replace(full, outruns=True)
    seen = status(64, learners=(full, learner("us-east", 64)), cap_send_mbit=100.0)
    seen = replace(seen, use_send_mbit=42.0, use_receive_mbit=9.8)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(status_view(seen))
    picture = capture.get()
    assert "receives 9.8 · sends 42.0 of 100 Mbit/s" in picture
    assert "link of eu-west  up 9.8 of 10 · down 4.2 Mbit/s  training outruns it" in picture
    assert "link of us-east" not in picture
    assert "eu-west training 64 outruns its link, us-east training 64" in status_line(seen)
    told = json.loads(status_json(seen))
    assert (told["cap_send_mbit"], told["use_receive_mbit"]) == (100.0, 9.8)
    assert [one["outruns"] for one in told["learners"]] == [True, False]
    assert told["learners"][0]["cap_up_mbit"] == 10.0


def test_kill_orders_are_read_and_due_once() -> None:
    orders = parse_kills(["us-east@30", "eu-west@10"], NAMES)
    drill = Drill(orders)
    assert drill.due(status(8)) == []
    assert [str(order) for order in drill.due(status(20))] == ["eu-west@10"]
    assert [str(order) for order in drill.due(status(40))] == ["us-east@30"]
    assert drill.due(status(60)) == []


@pytest.mark.parametrize("text", ["us-east", "us-east@", "@3", "us-east@-3", "nobody@3"])
def test_a_kill_order_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--kill"):
        parse_kills([text], NAMES)
