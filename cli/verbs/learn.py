"""`diloco learn`: one learner of a run."""

from __future__ import annotations

import threading
from pathlib import Path

from pydantic import Field

from cli.process import MemberSettings
from cli.stop import Unbegun, stop_on_signal
from cli.verb import Verb
from fragments.errors import SettingsError
from services.settings import CapMbit


class LearnSettings(MemberSettings):
    """Which run to join, as whom, and at what pace."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="the learner's name, unique within the run"
    )
    pace_s: float = Field(
        default=0.0,
        ge=0,
        description="least seconds from one step to the next; 0 for as fast as it can",
    )
    checkpoint_dir: Path | None = Field(
        default=None,
        description="directory of this learner's checkpoints, from the newest of which a process"
        " goes on; without it, inner moments are fresh at each start",
    )
    checkpoint_every_s: float = Field(
        default=60.0, gt=0, description="least seconds from one checkpoint to the next"
    )
    cap_up_mbit: CapMbit = Field(
        default=None,
        description="most Mbit/s of pseudo-gradients that this learner pushes up to the server",
    )
    receipts: Path | None = Field(
        default=None,
        description="file that gets a line of JSON for each contribution that the server has"
        " acknowledged, to audit a run by",
    )


def run(settings: LearnSettings) -> None:
    """Trains until the run is finished or SIGINT or SIGTERM; the lease is given back.

    Raises:
        UnreachableError: when the server is not reached within `patience_s`.
        RefusedError: when it will not have this learner.
        SettingsError, DataError: when the run's program cannot be built here, or where
            --checkpoint-dir names a file.
        CheckpointError: when the checkpoints there are those of another run or learner.
    """
    directory = settings.checkpoint_dir
    if directory is not None and directory.exists() and not directory.is_dir():
        raise SettingsError(f"--checkpoint-dir {directory} is a file: name a directory")
    training = threading.Event()
    unbegun = Unbegun(training, f"{settings.name}: stopped before it had joined")
    with stop_on_signal(exit_with_parent=settings.exit_with_parent, unbegun=unbegun) as stop:
        import structlog

        from cli.member import joined
        from learner.receipts import receipts_in

        structlog.contextvars.bind_contextvars(learner=settings.name)
        with (
            receipts_in(settings.receipts) as on_receipt,
            joined(settings, settings.cap_up_mbit) as member,
        ):
            if member is None:
                return
            from learner.run import CheckpointRule, Learner

            def on_state(state: str) -> None:
                if state == "training":
                    training.set()
                member.show_state(state)

            learner = Learner(
                settings.name,
                member.program,
                member.link,
                member.description,
                settings.pace_s,
                on_state,
                on_receipt,
                CheckpointRule(directory, settings.checkpoint_every_s) if directory else None,
            )
            outcome = learner.run(stop)
    if not training.is_set():
        print(unbegun.line)
        return
    ended = "the run is finished" if outcome.finished else "stopped before the end of the run"
    print(
        f"{settings.name}: {ended}; {outcome.steps} steps, {outcome.tokens:,} tokens,"
        f" waited {outcome.wait_share:.2%} of its time, weights {outcome.weights_digest[:16]}"
    )


VERB = Verb(
    name="learn",
    summary="train one island of a run",
    details=(
        "Train one island of a run: join the server, train on a shard of the data, answer when\n"
        "the server asks for what was learned, and adopt new versions between two steps. Ends by\n"
        "itself when the run is finished. All settings of the run come from the server.\n\n"
        "A server that is not there yet is waited for (--patience-s). One that goes away later\n"
        "stops nobody: the learner trains on and comes back to it.\n"
        "A learner that died goes on where it was when it is started again with the same\n"
        "--checkpoint-dir: with its inner moments, and with what the server has not taken yet.\n"
        "\n"
        "A cap holds what travels of weights and pseudo-gradients, over any 10 s, to so many\n"
        "Mbit/s (10^6 bits); heartbeats do not count. Training does not wait for it: `diloco\n"
        "status` says when it outruns the link."
    ),
    examples=(
        "examples:\n"
        "  diloco learn --address 127.0.0.1:7700 --name eu-west\n"
        "  diloco learn --address 127.0.0.1:7700 --name eu-west --data 'texts/*.txt'\n"
        "  diloco learn --address outer:7700 --name eu-west --checkpoint-dir /var/lib/diloco\n"
        "  diloco learn --address outer:7700 --name eu-west --cap-up-mbit 10 --cap-down-mbit 20\n\n"
        "exit codes: 2 settings, data or checkpoints, 3 nobody answers at the address, 4 refused"
    ),
    settings=LearnSettings,
    run=run,
)
