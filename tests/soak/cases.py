"""Hostile pushes, one a number: the same seed, number and target give the same bytes.

Three things may be tampered with: what is in the payload (its checksum made to fit), what the
header says, and the messages on the wire. A case tampers with one of them, sometimes with two.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.soak.messages import HEADERS, MESSAGES, Draft
from tests.soak.payloads import PAYLOADS
from tests.soak.target import LAYOUT, Target, Verdict, chunk, cut, first, header_of, honest


@dataclass(frozen=True, slots=True)
class Call:
    """One call of Push: its serialized messages."""

    messages: tuple[bytes, ...]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Case:
    """What is sent, and the names of what was done to it."""

    number: int
    kind: str
    calls: tuple[Call, ...]


def case(seed: int, number: int, target: Target) -> Case:
    """The case of that number."""
    rng = random.Random(f"{seed}/{number}")
    stages = [rng.choice(("values", "header", "wire"))]
    if rng.random() < 0.2:
        stages.append(rng.choice(("values", "header", "wire")))
    if rng.random() < 0.02:
        stages = []
    names, verdict = [], Verdict.TAKEN
    payload = honest(target.codec, LAYOUT, target.layout, rng)
    if "values" in stages:
        name = rng.choice(list(PAYLOADS))
        payload, verdict = PAYLOADS[name](target, rng)
        names.append(name)
    draft = Draft(rng, header_of(target, payload, rng), cut(payload.data or b"\0", rng))
    if "header" in stages:
        name = rng.choice(list(HEADERS))
        verdict = min(verdict, HEADERS[name](draft))
        names.append(name)
    draft.messages = [first(draft.header), *(chunk(*piece) for piece in draft.chunks)]
    lead = Verdict.REFUSED
    if "wire" in stages:
        name = rng.choice(list(MESSAGES))
        verdict = min(verdict, MESSAGES[name](draft))
        names.append(name)
    calls = [Call(tuple(draft.lead), lead)] if draft.lead else []
    calls.append(Call(tuple(draft.messages), verdict))
    return Case(number, " + ".join(names) or "honest", tuple(calls))


KINDS: Sequence[str] = ("honest", *PAYLOADS, *HEADERS, *MESSAGES)
"""Every single thing that is done."""
