"""The campaign: hostile pushes to a real server over real gRPC, and what must hold of each.

Each push is answered: with a receipt where it was sound, otherwise with a code and a sentence. What
is refused leaves the state as it was, and what is taken adds itself and nothing else. No push makes
the process allocate more than ALLOWED_BYTES.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.soak.cases import Case, case
from tests.soak.site import CODECS_OF_RUNS, Fault, Site

ALLOWED_BYTES = 256 << 10
"""Most that may be allocated while a push is answered, by sender and server together: an ordinary
one takes about a quarter of it, and the smallest bomb four times as much."""

_WARM_UP = 3


@dataclass(slots=True)
class Tally:
    """What was sent and what was answered.

    `peak_bytes`: the most that a single push made the process allocate.
    """

    cases: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0


def campaign(
    seed: int, numbers: range, tell: Callable[[Tally], None] = lambda _: None, every: int = 1000
) -> Tally:
    """Sends the cases of these numbers, in runs of all codecs, each as long as it has bases left.

    Raises Fault at the first that breaks a promise. `tell` hears of it after every so many cases.
    """
    tally = Tally()
    left = list(reversed(numbers))
    tracemalloc.start(1)
    try:
        while left:
            codec = CODECS_OF_RUNS[tally.runs.total() % len(CODECS_OF_RUNS)]
            tally.runs[codec] += 1
            with Site(codec) as site:
                for _ in range(_WARM_UP):
                    site.push_honestly()
                while left and site.has_target:
                    _send(site, case(seed, left.pop(), site.target), tally)
                    if tally.cases % every == 0:
                        tell(tally)
                site.settle()
    finally:
        tracemalloc.stop()
    return tally


def _send(site: Site, sent: Case, tally: Tally) -> None:
    """One case, and all that must hold after it."""
    tally.cases += 1
    tally.kinds[sent.kind] += 1
    for number, call in enumerate(sent.calls):
        tracemalloc.reset_peak()
        before_bytes = tracemalloc.get_traced_memory()[0]
        answer = site.push(call.messages)
        peak_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
        tally.answers[answer.word] += 1
        tally.peak_bytes = max(tally.peak_bytes, peak_bytes)
        wrong = site.wrong(sent.calls[: number + 1], answer)
        if peak_bytes > ALLOWED_BYTES:
            wrong = f"it allocated {peak_bytes} bytes, and {ALLOWED_BYTES} are allowed"
        if wrong:
            said = f"{answer.word}, {answer.sentence[:200]!r}"
            raise Fault(f"case {sent.number} ({sent.kind}): {wrong}; the answer was {said}")

