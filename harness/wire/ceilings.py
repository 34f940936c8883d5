"""Measures the stages of one side: `python -m harness.wire.ceilings SIDE LEARNERS SPEC REPORT`.

SIDE is "learner", "server" or "raw"; each has an environment of its own, which is why they are
processes. SPEC is the run's `RunSpec` as JSON, REPORT the file that gets {stage: `Ceiling`}.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pydantic import TypeAdapter

from fragments.runspec import RunSpec
from harness.environment import module, use_server_arithmetic
from harness.wire.ceiling import Ceiling

SIDES = ("raw", "learner", "server")
CEILINGS = TypeAdapter(dict[str, Ceiling])

_RAW_BYTES = 256 << 20


def argv(side: str, learners: int, spec: RunSpec, report: Path) -> tuple[str, ...]:
    """The command that measures one side."""
    return module(__name__, side, str(learners), spec.model_dump_json(), str(report))


def measure(side: str, learners: int, spec: RunSpec) -> dict[str, Ceiling]:
    """The stages of `side`."""
    if side == "raw":
        from harness.wire import raw

        return {"tcp": raw.tcp(_RAW_BYTES), "grpc": raw.grpc_stream(_RAW_BYTES)}
    if side == "server":
        use_server_arithmetic(os.environ)
    from harness.wire import stages

    of = stages.subject(spec)
    return stages.learner_stages(of) if side == "learner" else stages.server_stages(of, learners)


def main(side: str, learners: str, spec_json: str, report: str) -> None:
    """As the module says."""
    found = measure(side, int(learners), RunSpec.model_validate_json(spec_json))
    draft = Path(report).with_suffix(".part")
    draft.write_bytes(CEILINGS.dump_json(found))
    draft.replace(report)


if __name__ == "__main__":
    main(*sys.argv[1:])
