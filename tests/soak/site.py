"""A served run under hostile pushes: real engine, real gRPC, and a clock that stands still, so that
nothing but pushes changes its state.
"""

from __future__ import annotations

import queue
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import grpc
import jax.numpy as jnp
import numpy as np

from diloco.v1 import common_pb2, push_pb2
from fragments.codec import Codec
from fragments.errors import PayloadError
from fragments.payload import decode_f32
from fragments.records import (
    PROTOCOL_VERSION,
    Adopted,
    Ask,
    Hello,
    Lease,
    Published,
    RefusalCode,
    Report,
    Role,
    ServerNote,
    Version,
)
from fragments.runspec import RunSpec
from outer_server.core.state import RunState
from outer_server.server import OuterServer
from outer_server.store.rundir import create_run
from services import translate
from services.errors import MESSAGE_CHARS
from services.outer.server import OuterServices
from services.settings import ServerSettings
from tests.soak.cases import Call
from tests.soak.target import (
    BLOCK,
    LAYOUT,
    Target,
    Verdict,
    chunk,
    first,
    header_of,
    honest,
    payload_of,
    valid_of,
)

LEARNERS = 128
"""Hostile names in a run: of each, one push to each fragment may be taken."""

_MERGE_S = 30.0
_SENTENCE_WORDS = 3

_WORDS_OF_ANSWERS = frozenset(
    {code.name for code in RefusalCode} | {"DATA_LOSS", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
)
"""All refusals, and the statuses of a call that is wrong in itself."""


class PromiseError(AssertionError):
    """A promise that was broken."""


class Answer(NamedTuple):
    """`word`: "receipt", "duplicate" (of an earlier one), a refusal's code, or a status' name."""

    word: str
    sentence: str

    @property
    def is_receipt(self) -> bool:
        """Whether the push was taken."""
        return self.word == "receipt"


class Site:
    """One run. A learner that answers nothing keeps a round open; others are there to be misused.

    A context manager. A target is a base that no push has consumed.
    """

    def __init__(self, codec: str) -> None:
        self._spec = RunSpec.model_validate(
            {
                "run_id": f"soak-{codec}",
                "fragments": len(LAYOUT.fragments),
                "sync_interval": len(LAYOUT.fragments),
                # More than will ever answer: no round closes before the steady one has answered.
                "quorum": LEARNERS + 1,
                "max_learners": LEARNERS + 1,
                "budget_tokens": 1 << 60,
                "codec": {"kind": codec, "block": BLOCK},
            }
        )
        self._codec = Codec.of(self._spec.codec)
        self._stack = ExitStack()
        self._targets: list[Target] = []
        self._notes: queue.SimpleQueue[ServerNote] = queue.SimpleQueue()

    def __enter__(self) -> Site:
        with self._stack:
            scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self._birth(scratch / "run")
            server = OuterServer(scratch / "run", clock=lambda: 0.0)
            self._server = self._stack.enter_context(server)
            settings = ServerSettings(address="127.0.0.1:0", bulk_port=0, partial_bytes=1 << 20)
            services = OuterServices(self._server, settings)
            self._stack.callback(services.stop, 0.2)
            services.start()
            channel = grpc.insecure_channel(f"127.0.0.1:{services.ports.bulk}")
            self._stack.enter_context(channel)
            # Bytes as they are: a stub of ours would not send what is no message.
            self._call: Callable[..., push_pb2.PushResponse] = channel.stream_unary(
                "/diloco.v1.PushService/Push",
                response_deserializer=push_pb2.PushResponse.FromString,
            )
            self._populate()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def has_targets(self) -> bool:
        """Whether there is a base of every fragment left to push against."""
        return len({target.fragment for target in self._targets}) == len(LAYOUT.fragments)

    def target(self, fragment: int) -> Target:
        """The base that is pushed against now."""
        return next(target for target in self._targets if target.fragment == fragment)

    def push(self, messages: tuple[bytes, ...]) -> Answer:
        """One call of Push."""
        self._before = self._server.state
        try:
            response = self._call(iter(messages), timeout=30)
        except grpc.RpcError as error:
            # Every RpcError that a stub raises is also the call itself, which the types do not say.
            call = cast("grpc.Call", error)
            return Answer(call.code().name, call.details() or "")
        if response.HasField("receipt"):
            return Answer("duplicate" if response.receipt.duplicate else "receipt", "")
        code = common_pb2.RefusalCode.Name(response.refusal.code)
        return Answer(code.removeprefix("REFUSAL_CODE_"), response.refusal.reason)

    def wrong(self, calls: Sequence[Call], answer: Answer) -> str:
        """What is wrong about the answer to the last of these calls, or about the state after it;
        nothing where all is well.
        """
        before, after, verdict = self._before, self._server.state, calls[-1].verdict
        if self._server.failed:
            return "the engine has failed"
        if answer.word == "duplicate":  # another case had sent the same to the same base
            is_same = verdict is not Verdict.REFUSED and _untold(before) == _untold(after)
            return "" if is_same else "it was taken for a repetition"
        if answer.is_receipt:
            if verdict is Verdict.REFUSED:
                return "it was taken"
            header, data = _assembled(calls)
            return self._wrong_value(header, data) or self._wrong_receipt(before, after, header)
        if verdict is Verdict.TAKEN:
            return "it is sound, and was refused"
        if answer.word not in _WORDS_OF_ANSWERS:
            return "that is for faults of the server's own"
        if len(answer.sentence.split()) < _SENTENCE_WORDS:
            return "no sentence"
        if len(answer.sentence) > MESSAGE_CHARS:
            return f"a sentence of {len(answer.sentence)} characters"
        is_same = before is after or _untold(before) == _untold(after)
        return "" if is_same else "it changed the state"

    def settle(self) -> None:
        """The steady learner answers, and the open round merges all that was taken of its fragment:
        whatever that was, its weights stay finite, and those of the others as they are.

        Raises PromiseError where they do not.
        """
        (open_round,) = self._server.state.open_rounds
        before, fragment = self._server.state, open_round.fragment
        steady = Target(*self._run, self._codec.id, self._steady, fragment)
        if not self._push_to(steady).is_receipt:
            raise PromiseError("the steady learner's answer was refused")
        while not isinstance(note := self._notes.get(timeout=_MERGE_S), Published):
            pass
        (full,) = self._server.updates(self._steady, note.fragment, None)
        layout = LAYOUT.fragments[fragment]
        if not np.isfinite(decode_f32(layout, LAYOUT.rows_padded, full.payload)).all():
            raise PromiseError(f"fragment {fragment} is not finite after its merge")
        after = self._server.state
        if after.fragments[fragment].version != 1 or after.fragments[fragment].arrived:
            raise PromiseError(f"fragment {fragment} did not take one step")
        for index, (one, other) in enumerate(zip(before.fragments, after.fragments, strict=True)):
            if index != fragment and one != other:
                raise PromiseError(f"fragment {index} changed with the merge of {fragment}")

    def warm_up(self) -> None:
        """Ordinary pushes, which must be taken. Raises PromiseError where one is not."""
        for index in range(len(LAYOUT.fragments)):
            target = self.target(index)
            if not self._push_to(target).is_receipt:
                raise PromiseError("an honest push was refused")
            self._targets.remove(target)

    def _push_to(self, target: Target) -> Answer:
        rng = random.Random(0)
        payload = honest(target.codec, LAYOUT, target.layout, rng)
        messages = (first(header_of(target, payload, rng)), chunk(0, payload.data))
        return self.push(messages)

    def _birth(self, path: Path) -> None:
        draw = np.random.default_rng(0)
        shape = (LAYOUT.rows_padded, LAYOUT.block)
        values = [
            np.where(valid_of(LAYOUT, fragment), draw.standard_normal(shape), 0)
            for fragment in LAYOUT.fragments
        ]
        create_run(path, self._spec, LAYOUT, [value.astype(np.float32) for value in values])

    def _populate(self) -> None:
        """All join; the steady one adopts and steps, so a round opens, and asks it alone."""
        server = self._server
        self._run = (self._spec.run_id, server.describe().epoch)
        leases = [self._join(f"hostile-{i}") for i in range(LEARNERS)]
        self._targets = [
            Target(*self._run, self._codec.id, lease, fragment.index)
            for lease in leases
            for fragment in LAYOUT.fragments
        ]
        self._steady = self._join("steady")
        server.attach(self._steady, self._notes.put)
        for index, fragment in enumerate(server.state.fragments):
            version = Version(server.state.epoch, fragment.version)
            server.adopted(self._steady, Adopted(index, version, fragment.digest, 0))
        server.report(self._steady, Report(1, 16, 1))
        while not isinstance(self._notes.get(timeout=_MERGE_S), Ask):
            pass

    def _join(self, name: str) -> Lease:
        digest = self._server.describe().layout_digest
        hello = Hello(PROTOCOL_VERSION, self._spec.run_id, digest, name, Role.LEARNER, "1")
        return self._server.join(hello).lease

    def _wrong_value(self, header: push_pb2.PushHeader, data: bytes) -> str:
        """What was taken is what an encoder makes, to the bit, of what it decodes to."""
        layout = LAYOUT.fragments[header.key.fragment]
        payload = payload_of(self._codec.id, header.payload.raw_bytes, data)
        try:
            symbols, steps = self._codec.decode(layout, LAYOUT.rows_padded, payload)
        except PayloadError as error:
            return f"it was taken, and {error}"
        again = self._codec.encode(layout, jnp.asarray(symbols), jnp.asarray(steps))
        same = self._codec.decode(layout, LAYOUT.rows_padded, again)
        if not np.array_equal(symbols, same[0]) or not np.array_equal(steps, same[1]):
            return "what was taken decodes to what nobody encodes"
        return "" if np.isfinite(symbols).all() else "what was taken is not finite"

    def _wrong_receipt(self, before: RunState, after: RunState, header: push_pb2.PushHeader) -> str:
        name, index = header.lease.learner, header.key.fragment
        self._targets = [t for t in self._targets if (t.lease.learner, t.fragment) != (name, index)]
        *rest, newest = after.fragments[index].arrived
        expected = replace(before.fragments[index], arrived=(*rest, newest))
        round_, asked = expected.round, translate.version_from_wire(header.asked_version)
        if round_ is not None and asked == Version(before.epoch, round_.version):
            answered = round_.answered | {name}
            expected = replace(expected, round=replace(round_, answered=answered))
        mine = after.learners[name]
        expected_state = replace(
            before.with_learner(mine).with_fragment(index, expected),
            tokens_pushed=before.tokens_pushed + header.tokens,
        )
        is_new = tuple(rest) == before.fragments[index].arrived and newest.key.learner == name
        is_counted = mine.bases[index].consumed == 0 and newest.tokens == header.tokens
        if not is_new or not is_counted or expected_state != after:
            return "taking it changed more than it should"
        return ""


def _assembled(calls: Sequence[Call]) -> tuple[push_pb2.PushHeader, bytes]:
    """The last header, and the chunks of all calls together."""
    header, data = push_pb2.PushHeader(), b""
    for call in calls:
        for message in call.messages:
            request = push_pb2.PushRequest.FromString(message)
            if request.WhichOneof("message") == "header":
                header = request.header
            data += request.chunk.data
    return header, data


def _untold(state: RunState) -> RunState:
    """The state without what the status counts of refusals."""
    learners = {
        name: replace(record, tally=replace(record.tally, contributions_refused=0))
        for name, record in state.learners.items()
        if record.tally.contributions_refused
    }
    return replace(state, learners={**state.learners, **learners})
