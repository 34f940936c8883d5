"""A run's tape in sentences, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from fragments.records import Receipt, Refusal
from outer_server.core.events import (
    Attached,
    Change,
    Contributed,
    Declined,
    Denied,
    Drain,
    Evaluated,
    Event,
    Evict,
    HasAdopted,
    Hold,
    Join,
    Leave,
    Merged,
    Note,
    Release,
    Reported,
    RollBack,
    Started,
    Tick,
)
from outer_server.core.intervals import Account
from outer_server.history import Happened

_TOLD_BY_NOTES = (Join, Leave, Drain, Tick, Hold, Evict, Release, Change, RollBack)
"""Events of which the scheduler's own notes say all."""

_SMALL = (Reported, HasAdopted, Attached, Declined)
"""Events of which there are many: told when all is asked for."""


def when(happened: Happened) -> str:
    """Date and time of this machine, to the millisecond."""
    at = datetime.fromtimestamp(happened.record.unix_s).astimezone()
    return at.strftime("%Y-%m-%d %H:%M:%S") + f".{at.microsecond // 1000:03d}"


def sentences(happened: Happened, *, every: bool) -> list[str]:
    """What happened, as a person would say it; with `every`, reports and adoptions too."""
    # Of an evaluation the event itself says all.
    told = [_note(note) for note in happened.notes if note.what != "evaluated"]
    event = happened.record.event
    if isinstance(happened.reply, Denied):
        return [f"{_ASKED[type(event)]} and is refused: {happened.reply.reason}"]
    if isinstance(event, _SMALL) and not every:
        return told
    if happened.is_bare and isinstance(event, _TOLD_BY_NOTES):
        return _bare(event)
    if isinstance(event, _TOLD_BY_NOTES):
        return told
    return [_sentence(happened), *told]


_ASKED: dict[type[Event], str] = {
    Hold: "an operator asks to drain the run",
    Evict: "an operator asks to evict a learner",
    Release: "an operator asks for a release",
    Change: "an operator asks to change settings",
    RollBack: "an operator asks to go back to a snapshot",
}


def _bare(event: Event) -> list[str]:
    """One that notes would tell of, where nobody knows what came of it."""
    match event:
        case Join(hello):
            return [f"{hello.name} asks to join as a {hello.role}"]
        case Leave(learner):
            return [f"{learner} leaves"]
        case Drain(reason):
            return [f"the server is about to stop: {reason}"]
        case _:
            return [_ASKED[type(event)]] if type(event) in _ASKED else []


def names(happened: Happened) -> set[str]:
    """The learners and evaluators that it is about."""
    event = happened.record.event
    if isinstance(event, Join):
        return {event.hello.name}
    if isinstance(event, Merged):
        return {participant.learner for participant in event.order.participants}
    learner = getattr(event, "learner", None)
    noted = {str(value) for n in happened.notes for key, value in n.fields if key == "learner"}
    return noted | ({learner} if isinstance(learner, str) else set())


def as_json(happened: Happened) -> str:
    """One line: number, time, event with its fields, reply and notes."""
    record = happened.record
    line: dict[str, Any] = {
        "number": record.number,
        "at_s": record.at_s,
        "unix_s": record.unix_s,
        "event": type(record.event).__name__,
        "fields": dataclasses.asdict(record.event),
        "notes": [{"what": n.what, "reason": n.reason, **dict(n.fields)} for n in happened.notes],
    }
    if happened.reply is not None:
        line["reply"] = {
            "kind": type(happened.reply).__name__,
            **dataclasses.asdict(happened.reply),
        }
    return json.dumps(line, default=_plain)


def _plain(value: object) -> object:
    return value.model_dump() if isinstance(value, BaseModel) else str(value)


def account_lines(found: Account, *, as_json: bool) -> list[str]:
    """What came into every fragment from every shard, and why the rest did not."""
    if as_json:
        return [json.dumps(dataclasses.asdict(found), default=str)]
    lines = [
        f"shard {shard}: what was trained before batch {batch} has left the journal"
        for shard, batch in found.begins
    ]
    for shard, fragment in sorted({(each.shard, each.fragment) for each in found.merged}):
        mine = [each for each in found.merged if (each.shard, each.fragment) == (shard, fragment)]
        gaps = [each for each in found.gaps if (each.shard, each.fragment) == (shard, fragment)]
        merged = sum(each.stop - each.start for each in mine)
        missing: Counter[str] = Counter()
        for gap in gaps:
            missing[str(gap.reason)] += gap.stop - gap.start
        rest = ", ".join(f"{count} {reason}" for reason, count in sorted(missing.items()))
        lines.append(
            f"shard {shard}, fragment {fragment}: {merged} batches merged"
            + (f"; not merged: {rest}" if rest else "")
        )
    twice = sum(min(a.stop, b.stop) - max(a.start, b.start) for a, b in found.overlaps)
    lines.append(
        f"batches counted twice: {twice}; contributions whose steps are not as many"
        f" as their batches: {len(found.miscounts)}"
    )
    return lines


def _sentence(happened: Happened) -> str:
    match happened.record.event:
        case Started(generation, epoch, _, reason):
            because = f", which begins because {reason}" if reason else ""
            return f"a server begins: generation {generation}, epoch {epoch}{because}"
        case Contributed() as event:
            return _contributed(event, happened)
        case Merged() as event:
            return _merged(event, happened)
        case Reported(learner, _, report):
            return f"{learner} is at step {report.step}, {report.tokens} tokens"
        case HasAdopted(learner, _, adopted):
            return f"{learner} trains on fragment {adopted.fragment} {adopted.version}"
        case Declined(learner, _, decline):
            return f"{learner} has nothing of fragment {decline.fragment}: {decline.reason}"
        case Attached(learner):
            return f"{learner} listens"
        case Evaluated(_, _, evaluation):
            where = f"at step {evaluation.global_step}, {evaluation.tokens_trained} tokens"
            return f"held-out loss {evaluation.loss:.4f} {evaluation.unit} {where}"
        case other:
            return type(other).__name__


def _contributed(event: Contributed, happened: Happened) -> str:
    meta = event.meta
    what = (
        f"{event.learner} sends fragment {meta.key.fragment} on base {meta.key.base_version}: "
        f"{meta.steps} steps, {meta.tokens} tokens, batches {meta.cursor_from} to {meta.cursor_to}"
    )
    match happened.reply:
        case Receipt(_, duplicate=True):
            return f"{what}; a repetition, it has counted already"
        case Receipt(_, late=True):
            return f"{what}; late, it waits for the next round"
        case Refusal(code, reason):
            return f"{what}; refused ({code}): {reason}"
        case _:
            return what


def _merged(event: Merged, happened: Happened) -> str:
    version = f"fragment {event.fragment} is at version {happened.state.epoch}.{event.version}"
    if event.refused is not None:
        return f"{version}, which has the value of the last: {event.refused}"
    shares = ", ".join(f"{p.learner} {p.share:.2f}" for p in event.order.participants)
    how = "the mean of" if event.order.closing else "merged from"
    return f"{version}, {how} {shares}; digest {event.digest[:12]}"


_NOTES = {
    "joined": "{learner} joins as a {role}",
    "rejoined": "{learner} joins again as a {role}",
    "join_refused": "{learner} may not join",
    "retired": "{learner}, who has left, makes room for another name",
    "left": "{learner} leaves",
    "lost": "{learner} is lost",
    "evicted": "{learner} is evicted",
    "released": "{learner} may join again",
    "declined": "{learner} has nothing of fragment {fragment}",
    "contribution_refused": "a contribution of {learner} to fragment {fragment} is not taken",
    "digest_mismatch": "{learner} holds other values of fragment {fragment} than were published",
    "contribution_lost": "a contribution of {learner} to fragment {fragment} is not known here",
    "version_lost": "{learner} holds a version of fragment {fragment} that is not known here",
    "round_closed": "a round on fragment {fragment} at {version} closes with {participants}",
    "round_abandoned": "a round on fragment {fragment} at {version} is given up",
    "merge_refused": "a round on fragment {fragment} at {version} could not be merged",
    "phase": "the run is {phase}",
    "drained": "the run is {phase} for an operator",
    "changed": "settings are changed",
    "rolled_back": "the run goes back",
}
"""The notes of `outer_server.core` in words, before their reason."""


def _note(note: Note) -> str:
    fields = {key: str(value).replace(",", ", ") for key, value in note.fields}
    if note.what == "released" and "learner" not in fields:
        sentence = "rounds may open again"
    elif note.what in _NOTES:
        sentence = _NOTES[note.what].format(**fields)
    else:
        sentence = " ".join([note.what.replace("_", " "), *map(" ".join, fields.items())])
    if fields.get("missing"):
        sentence += f", without {fields['missing']}"
    return f"{sentence}: {note.reason}" if note.reason else sentence
