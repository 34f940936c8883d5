"""`make soak`: the campaign at length, and a table of what was sent and answered, as Markdown.

A case that breaks a promise ends it with its number: `python -m tests.soak --first N --cases 1`
sends that one alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
import time
from collections.abc import Mapping

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import structlog

from tests.soak.campaign import ALLOWED_BYTES, Tally, campaign
from tests.soak.cases import KINDS


def main() -> None:
    """Runs it; exit code 1 and the case in question where a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument(
        "--cases", type=int, default=100_000, help="how many (default: %(default)s)"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0, help="other cases under the same numbers")
    asked = parser.parse_args()
    # Every refusal is a line of the server's log, and what is unreadable a traceback of gRPC's.
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    began_s = time.monotonic()

    def tell(tally: Tally) -> None:
        rate = tally.cases / (time.monotonic() - began_s)
        sys.stderr.write(f"{tally.cases} of {asked.cases} cases, {rate:.0f} a second\n")

    numbers = range(asked.first, asked.first + asked.cases)
    tally = campaign(asked.seed, numbers, tell=tell)
    sys.stdout.write(_report(tally, asked.seed, numbers, time.monotonic() - began_s) + "\n")


def _report(tally: Tally, seed: int, numbers: range, took_s: float) -> str:
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    alone = {kind: tally.kinds[kind] for kind in KINDS}
    alone["two of these"] = tally.cases - sum(alone.values())
    runs = ", ".join(f"{count} of {name}" for name, count in sorted(tally.runs.items()))
    return f"""# Soak: {tally.cases} hostile pushes, no promise broken

`make soak`, seed {seed}, cases {numbers.start} to {numbers.stop - 1}, in {took_s:.0f} s, over
{tally.runs.total()} runs ({runs}). What is sent and what must hold of each is in `tests/soak`.
The most that a single push made the process allocate: {tally.peak_bytes >> 10} KiB, of
{ALLOWED_BYTES >> 10} that are allowed; the smallest bomb holds 1024. The process, with
sender and server in it, peaked at {peak_mib:.0f} MiB.

{_table("what was done to a push", alone)}

{_table("answer to a call", tally.answers)}"""


def _table(title: str, counts: Mapping[str, int]) -> str:
    rows = [f"| {name} | {count} |" for name, count in counts.items()]
    return "\n".join((f"| {title} | cases |", "|---|--:|", *rows))


if __name__ == "__main__":
    main()
