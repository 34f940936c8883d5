"""What a learner and an evaluator share: joining a run and holding its newest weights."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import structlog

from fragments.errors import LayoutError, UnreachableError
from fragments.layout import Layout, build_layout
from fragments.records import (
    PROTOCOL_VERSION,
    Ask,
    Goodbye,
    Hello,
    Phase,
    Published,
    RefusalCode,
    Report,
    Role,
    RunDescription,
    ServerNote,
    Version,
    Welcome,
)
from fragments.runspec import RunSpec
from fragments.tree import tensor_specs
from learner.held import Completed
from learner.inbox import Inbox
from learner.island import Island
from learner.ports import Link
from learner.program import Program, Shard
from learner.session import Session

PATIENCE_S = 600.0
"""Longest wait for a server that went away before it was joined, and for weights of which nothing
arrives: one fragment of a big model takes hours at a small cap.
"""

POLL_S = 0.2
"""How often a stop request is looked for while waiting for the server."""

_log = structlog.get_logger(__name__)


def layout_of(program: Program, params: object, spec: RunSpec) -> Layout:
    """The layout of `program` under a run's settings. Raises LayoutError."""
    specs = tensor_specs(params, averaged=program.averaged)
    return build_layout(specs, spec.fragments, spec.codec.block, program.identity)


class Member:
    """A process that joined a run: session, island and inbox.

    Args:
        name: unique within the run.
        role: learner or evaluator.
        program: what is trained; must be the one that the run was made with.
        link: the outer server.
        description: what `link.describe()` said.
        on_ask: called for every ask, from the link's thread; must not block.
        on_attached: as `Session` has it.

    Raises LayoutError when the program is not the one that the run was made with.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        program: Program,
        link: Link,
        description: RunDescription,
        on_ask: Callable[[Ask], None],
        on_attached: Callable[[], None],
    ) -> None:
        self.spec = RunSpec.model_validate_json(description.run_spec_json)
        params = program.init_params(self.spec.seed)
        self.layout = layout_of(program, params, self.spec)
        if self.layout.digest != description.layout_digest:
            raise LayoutError(
                f"the model built here ({program.identity!r}) differs from the run's "
                f"({Layout.from_json(description.layout_json).identity!r}): use the program and "
                "release that the run was made with"
            )
        self.island = Island(
            name, self.layout, self.spec.codec, params, cursor=0, adoption=self.spec.adoption
        )
        self.session = Session(link, self._hello, self._welcomed, on_attached, self._noted)
        self.inbox = Inbox(self.island, link, self.session)
        self._name = name
        self._role = role
        self._run_id = description.run_id
        self._generation = description.generation
        self.incarnation = uuid.uuid4().hex
        self._said_cursor = 0
        self._is_placed = False
        self._on_ask = on_ask

    def resume(self, kept: Completed) -> None:
        """Go on from what an earlier process had completed; before joining."""
        self.island.resume(kept)
        self.session.report(Report(kept.step, kept.tokens, kept.cursor))

    def join(self, stop: threading.Event) -> Welcome | None:
        """Join and fetch the first weights; None when `stop` was set before they came.

        Raises RefusedError, or UnreachableError when they do not come in time.
        """
        welcome = self.session.start(stop, PATIENCE_S)
        if welcome is None:
            return None
        self.inbox.start()
        return welcome if self.wait_newest(stop) else None

    def wait_newest(self, stop: threading.Event) -> bool:
        """Wait until every version heard of by now is prepared, or a newer one: where versions come
        faster than they can be pulled, there is always one more. False on stop.

        Raises the session's failure where there is one, UnreachableError when
        nothing arrives for PATIENCE_S.
        """
        waited_s, furthest_bytes = 0.0, self.inbox.arrived_bytes
        newest = self.inbox.wanted
        while not stop.is_set():
            if self.inbox.wait_prepared(newest, POLL_S):
                return True
            if self.session.failure is not None:
                raise self.session.failure
            waited_s += POLL_S
            if self.inbox.arrived_bytes > furthest_bytes:
                waited_s, furthest_bytes = 0.0, self.inbox.arrived_bytes
            if waited_s >= PATIENCE_S:
                raise UnreachableError(f"no weights arrived for {PATIENCE_S:.0f} s")
        return False

    def wait_over(self, stop: threading.Event) -> bool:
        """Wait while the closing lap is on. True: the run is finished, and its last versions are
        prepared. False: `stop` is set, or a server that was restarted says to train on.

        Raises as `wait_newest`.
        """
        while self.session.progress.phase is Phase.CLOSING and not stop.is_set():
            if self.session.failure is not None:
                raise self.session.failure
            self.session.wait_change(POLL_S)
        if self.session.failure is not None:
            raise self.session.failure
        return self.session.progress.phase is Phase.FINISHED and self.wait_newest(stop)

    def close(self, reason: str) -> None:
        """Leave the run."""
        self.inbox.stop()
        self.session.stop(reason)

    def _hello(self) -> Hello:
        self._said_cursor = self.island.completed.cursor
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            run_id=self._run_id,
            layout_digest=self.layout.digest,
            name=self._name,
            role=self._role,
            incarnation=self.incarnation,
            # What an earlier process held is told once it is known to be a base still.
            bases=self.island.held_bases() if self._is_placed else (),
            cursor=self._said_cursor,
            generation_seen=self._generation,
        )

    def _welcomed(self, welcome: Welcome) -> None:
        self._generation = max(self._generation, welcome.generation)
        self.island.consumed(welcome.consumed, welcome.epoch)
        newest = [Version(welcome.epoch, number) for number in welcome.versions]
        self._place(welcome, newest)
        self._want(newest)
        _log.info(
            "joined",
            token=welcome.lease.token,
            shard=welcome.shard_index,
            global_step=welcome.global_step,
            cursor=welcome.cursor,
        )

    def _place(self, welcome: Welcome, newest: list[Version]) -> None:
        """Take the place in the data that the server says."""
        shard = Shard(welcome.shard_index, welcome.shard_count)
        if not self._is_placed:
            self._is_placed = True
            self.island.begin(newest, shard, welcome.cursor)
        elif shard != self.island.completed.shard or welcome.cursor > self._said_cursor:
            _log.warning("moved", shard=shard.index, cursor=welcome.cursor)
            self.island.move(shard, welcome.cursor)

    def _want(self, newest: list[Version]) -> None:
        """Pull what a grant calls the newest versions, unless they are held already. One that is
        *older* than what is held says that another copy of the run is served now: what is held is
        no base there. (A note on the stream says no such thing: it may only have come late.)
        """
        for fragment, version in enumerate(newest):
            held = self.island.newest_version(fragment)
            if held is not None and version < held:
                _log.warning("went_back", fragment=fragment, held=str(held))
                self.island.forget(fragment)
        self.inbox.want_only(newest)

    def _noted(self, note: ServerNote) -> None:
        match note:
            case Ask() | Published() if note.fragment >= len(self.layout.fragments):
                _log.warning("unknown_fragment", fragment=note.fragment)
            case Ask():
                self._on_ask(note)
            case Published():
                self.inbox.want(note)
            case Goodbye(code=RefusalCode.BAD_PAYLOAD):
                self.island.forget_all()
            case _:
                pass
