"""The token bucket holds its cap over any 10 s, and so does what crosses the sockets."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.shaper import (
    BYTES_PER_MBIT,
    DEPTH_S,
    USE_WINDOW_S,
    Bucket,
    Intake,
    Meter,
    Shaper,
    chunk_bytes,
    told_cap,
    window_options,
)

MIB = 1 << 20
CAPS = st.floats(0.1, 2000.0)


def stream_chunks(draw: st.DataObject, largest: int) -> Iterator[int]:
    """Endless chunks of one stream: whole ones, and now and then a payload's short last one."""
    pattern = draw.draw(st.lists(st.sampled_from((1.0, 1.0, 1.0, 0.6, 0.2)), min_size=1))
    return (max(1, int(largest * share)) for share in itertools.cycle(pattern))


def passes(
    rate: float, streams: list[Iterator[int]], late_s: float, until_s: float
) -> list[tuple[float, int]]:
    """(time, bytes) of all that passes a bucket when every stream always has something to send.

    A sleeping stream wakes `late_s` too late. One that need not sleep goes on after a microsecond.
    """
    bucket = Bucket.full(rate, 0.0)
    turns = [(0.0, number) for number in range(len(streams))]
    passed = []
    while turns[0][0] < until_s:
        now_s, number = heapq.heappop(turns)
        size = next(streams[number])
        bucket, wait_s = bucket.take(size, now_s)
        at_s = now_s + wait_s + late_s if wait_s > 0 else now_s
        passed.append((at_s, size))
        heapq.heappush(turns, (at_s + 1e-6, number))
    return sorted(passed)


@given(st.data(), CAPS, st.integers(1, 5), st.floats(0.0, 0.04))
def test_any_ten_seconds_carry_the_cap(
    draw: st.DataObject, cap: float, count: int, late_s: float
) -> None:
    """Within 5% either way, whatever streams share it and however late they are woken."""
    rate, largest = cap * BYTES_PER_MBIT, chunk_bytes(MIB, cap)
    if count == 1:
        late_s = min(late_s, 0.5 * largest / rate)  # alone, a short chunk cannot cover a long sleep
    until_s = 22.0 if largest / rate > 0.02 else 11.0
    passed = passes(rate, [stream_chunks(draw, largest) for _ in range(count)], late_s, until_s)
    times = [at_s for at_s, _ in passed]
    sums = [0, *itertools.accumulate(size for _, size in passed)]
    starts = [at_s for at_s in times[:: max(1, len(times) // 200)] if at_s + 10.0 <= until_s]
    assert starts
    for start_s in starts:
        # Closed at both ends, and open at both: the worst windows of either kind.
        most = sums[bisect.bisect_right(times, start_s + 10.0)]
        most -= sums[bisect.bisect_left(times, start_s)]
        least = sums[bisect.bisect_left(times, start_s + 10.0)]
        least -= sums[bisect.bisect_right(times, start_s)]
        assert most <= 1.05 * rate * 10.0
        assert least >= 0.95 * rate * 10.0


@given(CAPS, st.floats(0.0, 1e6), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=40))
def test_a_pause_saves_up_no_more_than_a_tenth_of_a_second(
    cap: float, pause_s: float, shares: list[float]
) -> None:
    rate, largest = cap * BYTES_PER_MBIT, chunk_bytes(MIB, cap)
    bucket = Bucket.full(rate, 0.0)
    at_once = 0
    for share in shares:
        size = max(1, int(largest * share))
        bucket, wait_s = bucket.take(size, pause_s)
        at_once += size if wait_s == 0 else 0
    assert at_once <= rate * DEPTH_S


@given(CAPS, st.integers(2, 6), st.floats(0.0, 0.02))
def test_streams_share_equally_and_in_order(cap: float, count: int, late_s: float) -> None:
    rate, largest = cap * BYTES_PER_MBIT, chunk_bytes(MIB, cap)
    taken = [0] * count
    bucket, last_s = Bucket.full(rate, 0.0), 0.0
    turns = [(0.0, number, number) for number in range(count)]
    for turn in range(count, 50 * count):
        now_s, _, number = heapq.heappop(turns)
        bucket, wait_s = bucket.take(largest, now_s)
        assert now_s + wait_s >= last_s * (1 - 1e-9)  # whoever asked first goes first
        last_s = now_s + wait_s
        taken[number] += 1
        heapq.heappush(turns, (now_s + wait_s + late_s, turn, number))
    assert max(taken) - min(taken) <= 1


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 1 << 20)), max_size=40))
def test_the_meter_says_the_mean_of_the_last_seconds(steps: list[tuple[float, int]]) -> None:
    now_s = 100.0
    meter, events = Meter(now_s), []
    for gap_s, size in steps:
        now_s += gap_s
        meter.count(size, now_s)
        events.append((now_s, size))
    since_s = max(100.0, int(now_s / 0.5) * 0.5 - USE_WINDOW_S + 0.5)
    expected = sum(size for at_s, size in events if at_s >= since_s) / max(1.0, now_s - since_s)
    assert meter.rate_bytes_s(now_s) == pytest.approx(expected)
    assert meter.rate_bytes_s(now_s + 11.0) == 0.0


def test_chunks_and_windows_follow_the_cap() -> None:
    assert chunk_bytes(MIB, None) == chunk_bytes(MIB, None, None) == MIB
    assert chunk_bytes(MIB, 10.0) == 125_000  # 0.1 s
    assert chunk_bytes(MIB, 100.0, 10.0) == 125_000
    assert chunk_bytes(MIB, 1000.0) == MIB
    assert [told_cap(cap) for cap in (5.0, 0.0, -1.0, math.nan, math.inf)] == [5.0] + 4 * [None]
    assert window_options(None, 1) == []
    assert dict(window_options(10.0, 1))["grpc.http2.lookahead_bytes"] == 250_000
    assert dict(window_options(10.0, 16))["grpc.http2.lookahead_bytes"] == 64 << 10


def test_who_waits_holds_nobody_up_and_can_be_called_off() -> None:
    shaper, over = Shaper(0.1), threading.Event()
    waiter = threading.Thread(target=shaper.wait, args=(10**7, over))  # 800 s
    waiter.start()
    shaper.count(125)
    assert shaper.use_mbit > 0
    assert waiter.is_alive()
    over.set()
    waiter.join(10)
    assert not waiter.is_alive()


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=30), st.integers(1, 30_000))
def test_reading_pays_once_for_each_byte_and_before_it_reads(
    sizes: list[int], expected: int
) -> None:
    """Against chunks that are larger or smaller than was expected."""
    paid: list[int] = []

    class Ledger(Shaper):
        def wait(self, num_bytes: int, over: threading.Event) -> None:
            paid.append(num_bytes)

    intake, left = Intake(Ledger(), expected, threading.Event()), sum(sizes)
    for size in sizes:
        intake.before(left)
        ahead = sum(sizes) - left
        assert sum(paid) >= ahead + min(left, expected, size)
        assert sum(paid) <= ahead + max(expected, size) or len(paid) == 1
        intake.after(size)
        left -= size
    assert sum(paid) == sum(sizes)
