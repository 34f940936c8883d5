"""What an operator may do to a run that is served: see `outer_server.core.admin` for the rules."""

from __future__ import annotations

import math

from fragments.changes import changed
from fragments.errors import BusyError, RunDirectoryError, SettingsError, StorageError
from fragments.records import Answered, Phase
from outer_server.core.admin import Request
from outer_server.core.events import Change, Denied, Evict, Hold, Point, Release, RollBack
from outer_server.core.membership import MAX_TEXT, because
from outer_server.core.state import Rollback, RunState
from outer_server.engine import Engine
from outer_server.parameters import Parameters
from outer_server.store.rundir import RunDirectory
from outer_server.store.snapshot import Known, Restored

SNAPSHOT_S = 3000.0
"""Longest wait for a snapshot that is wanted now."""


TRAINED = "trained"
"""For a budget: as many tokens as are trained by now."""

_BUDGET = "budget_tokens"


class Administration:
    """Thread-safe. Each call is answered once it is durable, and may be repeated.

    Raises SettingsError for what cannot be done, BusyError or StorageError for what cannot be done
    now; nothing has changed then.
    """

    def __init__(self, engine: Engine, directory: RunDirectory, parameters: Parameters) -> None:
        self._engine = engine
        self._directory = directory
        self._parameters = parameters
        self.stop_reason = ""

    def drain(self, reason: str) -> Answered:
        """Open no more rounds until `release`."""
        return self._ask(Hold(reason[:MAX_TEXT]))

    def stop(self, reason: str) -> Answered:
        """Have whoever serves this end it: it looks at `stop_reason`, "" until then."""
        is_new = not self.stop_reason
        self.stop_reason = self.stop_reason or f"stopped by an operator{because(reason)}"
        return Answered("the server writes a last snapshot and ends", is_new)

    def evict(self, name: str, reason: str, for_s: float | None, *, drop: bool) -> Answered:
        """End a name's lease and grant it no other until `release`, or for a time."""
        return self._ask(Evict(name, reason[:MAX_TEXT], for_s, drop))

    def release(self, name: str | None, reason: str) -> Answered:
        """Undo `evict` for a name, or `drain` where there is none."""
        return self._ask(Release(name, reason[:MAX_TEXT]))

    def change(self, changes: tuple[tuple[str, str], ...], reason: str) -> Answered:
        """Change settings of the run, given as texts by dotted key; all or none. A budget that is
        trained already would end the run: whoever wants that says TRAINED for its value.
        """
        state = self._engine.state
        if dict(changes) == {_BUDGET: TRAINED} and state.phase in (Phase.CLOSING, Phase.FINISHED):
            return Answered("the budget is trained already", changed=False)
        meant = _meant(state, changes)
        self._parameters.check_outer(changed(state.spec, meant).outer)
        return self._ask(Change(meant, reason[:MAX_TEXT]))

    def roll_back(self, snapshot: str, up_to_version: int | None, reason: str) -> Answered:
        """Go back to a snapshot: the one of that name or, for "", the newest of this run whose
        fragments are all at `up_to_version` or below.
        """
        state = self._engine.state
        chosen = _chosen(self._directory.known(), state, snapshot, up_to_version)
        point = Point.of(chosen.name, chosen.state)
        rollback = Rollback(state.epoch + 1, point.snapshot, point.rounds_merged, reason)
        event = RollBack(point, rollback.epoch, reason[:MAX_TEXT])
        restored = self._engine.between_snapshots(lambda: self._restored(rollback))
        try:
            return _answer(self._engine.call(event, values=restored.fragments))
        except (SettingsError, StorageError):
            self._engine.between_snapshots(lambda: self._directory.forget_rollback(rollback))
            raise

    def snapshot(self) -> Answered:
        """Write a snapshot now; answered once it is durable."""
        try:
            return _answer(self._engine.snapshot(SNAPSHOT_S))
        except TimeoutError:
            raise BusyError("the snapshot is not written yet: it goes on") from None

    def _ask(self, event: Request) -> Answered:
        return _answer(self._engine.call(event))

    def _restored(self, rollback: Rollback) -> Restored:
        try:
            return self._directory.prepare_rollback(rollback)
        except RunDirectoryError as error:
            raise SettingsError(f"{error}: choose another") from error
        except OSError as error:
            raise StorageError(f"the server's disk takes nothing: {error.strerror}") from error


def _meant(state: RunState, changes: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """`changes` with a number for TRAINED. Raises SettingsError for a budget that is a slip."""
    trained = state.tokens_trained
    if (_BUDGET, TRAINED) in changes:
        return tuple((key, str(trained) if key == _BUDGET else value) for key, value in changes)
    budget = changed(state.spec, changes).budget_tokens
    is_new = budget != state.spec.budget_tokens and state.phase is not Phase.FINISHED
    if is_new and budget < trained:
        raise SettingsError(
            f"{_BUDGET}={budget}: {trained} tokens are trained already, so this would end the run "
            f"at once; where it shall end now, say {_BUDGET}={TRAINED}"
        )
    return changes


def _answer(reply: object) -> Answered:
    if isinstance(reply, Denied):
        raise SettingsError(reply.reason)
    if not isinstance(reply, Answered):
        raise TypeError(f"an operator is answered with Answered or Denied, not {reply!r}")
    return reply


def _chosen(found: list[Known], state: RunState, name: str, up_to_version: int | None) -> Known:
    """The snapshot that is meant. Raises SettingsError, naming those that are there."""
    most = math.inf if up_to_version is None else up_to_version
    if name:
        meant = [each for each in found if each.name == name.zfill(6)]
    else:
        meant = [
            each
            for each in found
            if max(_versions(each)) <= most and not _is_left_behind(each, state.rollbacks)
        ]
    if meant:
        return meant[-1]
    wanted = f"snapshot {name[:MAX_TEXT]}" if name else f"one up to version {up_to_version}"
    there = "; ".join(
        f"{each.name} (epoch {each.state.epoch}, {each.state.rounds_merged} rounds, "
        f"versions up to {max(_versions(each))})"
        for each in found
    )
    raise SettingsError(f"there is no {wanted}; there are {there}")


def _is_left_behind(known: Known, rollbacks: tuple[Rollback, ...]) -> bool:
    """Whether a rollback has gone back to before this snapshot."""
    return any(
        known.state.epoch < rollback.epoch and int(known.name) > int(rollback.snapshot)
        for rollback in rollbacks
    )


def _versions(known: Known) -> list[int]:
    return [fragment.version for fragment in known.state.fragments]
