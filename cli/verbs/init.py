"""`diloco init`: the settings, the layout and version 0 of a run, into a directory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from cli import exit as exits
from cli.keys import Positional, VerbSettings
from cli.stop import Unbegun, stop_on_signal
from cli.verb import Verb
from fragments.policies import Policy, spec_of
from fragments.runspec import RunSpec

HIDDEN = frozenset({"spec_version", "program.identity", "program.data_digest"})
"""Run settings that init fills in itself."""


class InitSettings(VerbSettings, RunSpec):
    """Where to write, from what data, and all settings of the run."""

    hidden_keys: ClassVar[frozenset[str]] = HIDDEN

    run_dir: Annotated[Path, Positional] = Field(description="directory to make for the run")
    if_missing: bool = Field(
        default=False, description="succeed quietly where a run is already there"
    )
    data: str | None = Field(
        default=None,
        min_length=1,
        description="text or JSONL files to train on: a file, a directory with all below it, or a"
        " glob; without it, the source of Python's standard library",
    )
    policy: Policy | None = Field(
        default=None,
        description="settings of a known algorithm, under those that are given: decoupled (the"
        " defaults), diloco (synchronous) or streaming",
    )
    warm: bool = Field(
        default=False,
        description="then compile what learners and evaluators run, into the cache that"
        " JAX_COMPILATION_CACHE_DIR names: for a machine on which several are about to start",
    )
    learners: int = Field(
        default=4, ge=1, description="learners that are expected; for advice only, any may join"
    )


def run_spec(settings: InitSettings) -> RunSpec:
    """The run's part of the verb's settings."""
    return spec_of(settings.model_dump(exclude_unset=True), settings.policy)


def run(settings: InitSettings) -> None:
    """Writes the run directory and says what is in it; then compiles, with `warm`.

    Raises:
        RunDirectoryError: when a run is already there, unless `if_missing`.
        KeyboardInterrupt: when it was stopped; nothing is left then.
    """
    if settings.if_missing and (settings.run_dir / "run.json").exists():
        from outer_server.store.rundir import read_run

        found, _ = read_run(settings.run_dir)
        print(f"{settings.run_dir}: run {found.run_id} is there already; nothing to do")
        return
    # Compiling cannot be interrupted, but has nothing to clean up; writing is the other way round.
    unbegun = Unbegun(threading.Event(), "diloco: stopped before it was done", exits.STOPPED)
    with stop_on_signal(unbegun=unbegun) as stop:
        from harness.birth import prepare_birth
        from harness.lengths import advice

        birth = prepare_birth(run_spec(settings), settings.data)
        if stop.is_set():
            raise KeyboardInterrupt
    birth.write(settings.run_dir)
    layout = birth.layout
    print(
        f"{settings.run_dir}: run {birth.spec.run_id}, {layout.num_values:,} parameters in"
        f" {len(layout.tensors)} tensors, {len(layout.fragments)} fragments;"
        f" {birth.spec.budget_tokens:,} tokens to train\n"
        f"next: diloco serve {settings.run_dir}"
    )
    for sentence in advice(birth.spec, birth.tokens_per_step, settings.learners):
        print(f"advice: {sentence}")
    if settings.warm:
        from harness.warm import compile_all

        print("compiling what learners and evaluators run", flush=True)
        compile_all(birth.spec, settings.data)


VERB = Verb(
    name="init",
    summary="make a run directory: settings, layout and version 0",
    details=(
        "Make a run directory: the settings of the run, the layout of its fragments and version 0\n"
        "of its parameters. The settings belong to the run from then on: the server tells them\n"
        "to every process that joins. Nothing is overwritten."
    ),
    examples=(
        "examples:\n"
        "  diloco init runs/mine --budget-tokens 2000000 --sync-interval 0:4,0.25:24\n"
        "  diloco init runs/mine --data 'texts/*.txt' --program.settings width=192\n"
        "then:\n"
        "  diloco serve runs/mine"
    ),
    settings=InitSettings,
    run=run,
)
