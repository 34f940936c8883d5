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
from tests.soak.site import PromiseError, Site
from tests.soak.target import LAYOUT

ALLOWED_BYTES = 256 << 10
"""Most that may be allocated while a push is answered, by sender and server together: an ordinary
one takes about a quarter of it, and the smallest bomb four times as much."""

CODECS = ("int8", "bf16", "f32")
CASES_OF_A_RUN = 2000

_TELL_EVERY = 2500


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
    seed: int,
    numbers: range,
    *,
    measured_every: int = 1,
    tell: Callable[[Tally], None] = lambda _: None,
) -> Tally:
    """Sends the cases of these numbers, CASES_OF_A_RUN to a run.

    Measuring memory doubles what a case costs: of the numbers, each `measured_every`-th is. `tell`
    hears of it now and then. Raises PromiseError at the first case that breaks a promise.
    """
    tally = Tally()
    left = list(reversed(numbers))
    while left:
        codec = _codec_of(left[-1])
        tally.runs[codec] += 1
        with Site(codec) as site:
            site.warm_up()
            while left and _codec_of(left[-1]) == codec and site.has_targets:
                number = left.pop()
                sent = case(seed, number, site.target(number % len(LAYOUT.fragments)))
                _send(site, sent, tally, measured=number % measured_every == 0)
                if tally.cases % _TELL_EVERY == 0:
                    tell(tally)
            site.settle()
    return tally


def _codec_of(number: int) -> str:
    """A case is the same wherever a campaign begins."""
    return CODECS[number // CASES_OF_A_RUN % len(CODECS)]


def _send(site: Site, sent: Case, tally: Tally, *, measured: bool) -> None:
    """One case, and all that must hold after it."""
    tally.cases += 1
    tally.kinds[sent.kind] += 1
    for number, call in enumerate(sent.calls):
        if measured:
            tracemalloc.start(1)
        answer = site.push(call.messages)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        tally.answers[answer.word] += 1
        tally.peak_bytes = max(tally.peak_bytes, peak_bytes)
        wrong = site.wrong(sent.calls[: number + 1], answer)
        if peak_bytes > ALLOWED_BYTES:
            wrong = f"it allocated {peak_bytes} bytes, and {ALLOWED_BYTES} are allowed"
        if wrong:
            said = f"{answer.word}, {answer.sentence[:200]!r}"
            raise PromiseError(f"case {sent.number} ({sent.kind}): {wrong}; the answer was {said}")
