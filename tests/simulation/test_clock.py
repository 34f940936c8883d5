from __future__ import annotations

import pytest

from simulation.clock import Order, StalledError, VirtualClock
from simulation.pipe import Pipe


def test_events_happen_by_time_then_order_then_as_they_were_scheduled() -> None:
    clock, happened = VirtualClock(), []
    clock.at(2.0, Order.ARRIVAL, lambda: happened.append("later"))
    clock.at(1.0, Order.BEGIN, lambda: happened.append("begin"))
    clock.at(1.0, Order.ARRIVAL, lambda: happened.append("first arrival"))
    clock.at(1.0, Order.ARRIVAL, lambda: happened.append("second arrival"))
    clock.at(1.0, Order.COMPLETION, lambda: happened.append("completion"))
    clock.run(lambda: len(happened) == 5)
    assert happened == ["completion", "first arrival", "second arrival", "begin", "later"]
    assert clock.now_s == 2.0


def test_what_an_event_schedules_for_its_own_instant_still_happens_then() -> None:
    clock, seen = VirtualClock(), []

    def first() -> None:
        clock.at(0.0, Order.COMPLETION, lambda: seen.append(clock.now_s))

    clock.at(3.0, Order.BEGIN, first)
    clock.run(lambda: bool(seen))
    assert seen == [3.0]


def test_a_cancelled_event_does_not_happen() -> None:
    clock, happened = VirtualClock(), []
    clock.at(1.0, Order.TIMER, lambda: happened.append("cancelled")).cancel()
    clock.at(2.0, Order.TIMER, lambda: happened.append("kept"))
    clock.run(lambda: bool(happened))
    assert happened == ["kept"]


def test_a_run_that_cannot_end_says_so() -> None:
    clock = VirtualClock()
    with pytest.raises(StalledError, match="nothing is left to happen"):
        clock.run(lambda: False)
    clock.at(100.0, Order.TIMER, lambda: None)
    with pytest.raises(StalledError, match="not over"):
        clock.run(lambda: False, limit_s=50.0)


def test_payloads_of_a_pipe_follow_one_another() -> None:
    clock, arrived = VirtualClock(), []
    pipe = Pipe(clock, mbit_s=8.0, fixed_s=None, latency_s=0.5)
    pipe.send(2_000_000, lambda: arrived.append(("one", clock.now_s)))
    pipe.send(2_000_000, lambda: arrived.append(("two", clock.now_s)))
    clock.run(lambda: len(arrived) == 2)
    # 16 Mbit at 8 Mbit/s are 2 s each; the latency is on top, and does not occupy the line.
    assert arrived == [("one", 2.5), ("two", 4.5)]
