"""When a snapshot is due."""

from __future__ import annotations

import time
from dataclasses import replace

from outer_server.core.state import new_state
from outer_server.saver import Mark, Saver, SnapshotRule
from outer_server.store.snapshot import Saved, Snapshot
from outer_server.store.unwritten import Unwritten
from tests.support.tiny import tiny_spec

RULE = SnapshotRule(every_rounds=100, every_s=1.0)


def _saver(takes_s: float) -> Saver:
    def save(snapshot: Snapshot) -> Saved:
        del snapshot
        time.sleep(takes_s)
        return Saved("000001", None)

    return Saver(save, RULE, Mark(1, 0, 0))


def _write(saver: Saver, rounds: int, now_s: float) -> None:
    state = replace(new_state(tiny_spec(), ["", ""], 1), rounds_merged=rounds)
    saver.begin(Snapshot(state, Unwritten(()), {}, 0), now_s)
    saver.between(lambda: None)  # It is written.


def test_by_the_clock_only_if_a_round_was_merged() -> None:
    saver = _saver(0.0)
    _write(saver, 5, 0.0)
    assert not saver.is_due(Mark(1, 5, 0), 100.0)
    assert not saver.is_due(Mark(1, 6, 0), 0.5)
    assert saver.is_due(Mark(1, 6, 0), 1.5)
    saver.close()


def test_snapshots_that_take_long_come_more_seldom() -> None:
    saver = _saver(0.2)
    _write(saver, 5, 0.0)
    assert not saver.is_due(Mark(1, 6, 0), 0.2 / RULE.share - 0.1)
    # However busy the machine was meanwhile.
    assert saver.is_due(Mark(1, 6, 0), 1000.0)
    assert saver.is_due(Mark(1, 105, 0), 0.5), "after so many rounds all the same"
    saver.close()


def test_however_long_one_took_the_next_comes_in_some_minutes() -> None:
    """A process that is stopped, or a disk that hangs, makes hours of it."""
    assert RULE.pause_s(took_s=5.0) == 5.0 / RULE.share
    assert RULE.pause_s(took_s=6 * 3600.0) == RULE.longest_s == 600.0
    assert SnapshotRule(every_s=3600.0).pause_s(took_s=5.0) == 3600.0, "a longer one is asked for"


def test_one_that_failed_is_tried_again_after_the_plain_pause() -> None:
    fails = False

    def save(snapshot: Snapshot) -> Saved:
        del snapshot
        time.sleep(0.2)
        if fails:
            raise OSError(28, "No space left on device")
        return Saved("000001", None)

    saver = Saver(save, RULE, Mark(1, 0, 0))
    _write(saver, 5, 0.0)
    fails = True
    _write(saver, 6, 1000.0)
    assert not saver.is_due(Mark(1, 1000, 0), 1000.5), "not at every turn"
    assert saver.is_due(Mark(1, 6, 0), 1001.5)
    saver.close()
