"""What a run is compared with: a bigram model, and one learner alone on its share of the tokens.

Runs as a process of its own (`python -m harness.baselines JSON`), so that it can be ended at any
moment and so that it may use every core, now that the run is over.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fragments.runspec import RunSpec


@dataclass(frozen=True, slots=True)
class Baselines:
    """Held-out losses in the program's unit; `bigram` is None where the program has no such model.

    `alone` is what one learner reaches on `alone_tokens` tokens, in `alone_wall_s` seconds.
    """

    bigram: float | None
    alone: float
    alone_tokens: int
    alone_wall_s: float


def request(spec: RunSpec, data: str | None, tokens: int, answer: Path) -> str:
    """The argument of the process: a run, and the tokens that the one learner gets."""
    return json.dumps(
        {
            "spec": spec.model_dump(mode="json"),
            "data": data,
            "tokens": tokens,
            "answer": str(answer),
        }
    )


def read_answer(path: Path) -> Baselines:
    """What the process wrote."""
    return Baselines(**json.loads(path.read_text(encoding="utf-8")))


def compute(spec: RunSpec, data: str | None, tokens: int) -> Baselines:
    """Computes both; the one learner starts from the run's own initial parameters."""
    from harness.programs import load_program
    from learner.reference.alone import train_alone

    program: Any = load_program(spec, data)
    bigram = program.bigram_loss() if hasattr(program, "bigram_loss") else None
    started_s = time.monotonic()
    alone = train_alone(program, tokens, spec.seed)
    return Baselines(bigram, alone, tokens, round(time.monotonic() - started_s, 3))


def _main(argument: str) -> None:
    asked = json.loads(argument)
    found = compute(RunSpec.model_validate(asked["spec"]), asked["data"], asked["tokens"])
    answer = Path(asked["answer"])
    part = answer.with_suffix(".part")
    part.write_text(
        json.dumps({name: getattr(found, name) for name in Baselines.__slots__}), encoding="utf-8"
    )
    part.replace(answer)


if __name__ == "__main__":
    _main(sys.argv[1])
