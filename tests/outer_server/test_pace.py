"""The pace of a run is that of now."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fragments.records import Report
from outer_server.core.state import RunState, new_state
from outer_server.pace import Pace
from tests.support.records import learner_record
from tests.support.tiny import tiny_spec


def _at(**tokens: int) -> RunState:
    """A run with learners of so many tokens; 0 where nothing of this lease was heard yet."""
    state = new_state(tiny_spec(), ("d0", "d1"), generation=1)
    for name, count in tokens.items():
        report = Report(count // 16, count, 0)
        state = state.with_learner(learner_record(name, report=report, has_stepped=count > 0))
    return state


def test_the_pace_is_that_of_the_last_ten_seconds() -> None:
    pace = Pace()
    assert pace.look(_at(a=160), 0.0) == 0.0
    for second in range(1, 30):
        found = pace.look(_at(a=160 + 160 * second), float(second))
        assert found == pytest.approx(160.0)
    for second in range(30, 40):
        pace.look(_at(a=160 + 160 * 29), float(second))
    assert pace.look(_at(a=160 + 160 * 29), 40.0) == 0.0


def test_what_was_trained_while_the_server_was_away_is_not_its_pace() -> None:
    pace = Pace()
    pace.look(_at(a=0, b=0), 0.0)
    # Both tell of a million tokens on their first report, and go on with 16 a second.
    pace.look(_at(a=1_000_000), 1.0)
    pace.look(_at(a=1_000_016, b=1_000_000), 2.0)
    assert pace.look(_at(a=1_000_032, b=1_000_016), 3.0) == pytest.approx((16 * 3) / 3)
    again = _at(a=2_000_000, b=1_000_032)
    again = again.with_learner(replace(again.learners["a"], token=2))
    assert pace.look(again, 4.0) == pytest.approx((16 * 4) / 4)
