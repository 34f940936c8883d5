from __future__ import annotations

import threading

import pytest

from fragments.errors import BusyError, DilocoError, PayloadError, RefusedError, UnreachableError
from fragments.records import RefusalCode
from services.client.retry import Attempts, TransferPace, retried
from services.errors import OlderServerError
from services.settings import BULK_DEADLINE_LIMIT_S, ClientSettings

QUICK = ClientSettings(tries=3, retry_wait_s=0.001, retry_wait_max_s=0.002)


@pytest.mark.parametrize("kind", [UnreachableError, BusyError, PayloadError])
def test_what_passes_is_tried_so_many_times(kind: type[DilocoError]) -> None:
    tries = []

    def call(attempts: Attempts) -> None:
        tries.append(attempts.first)
        raise kind("not now")

    with pytest.raises(kind):
        retried(call, QUICK, threading.Event())
    assert tries == [True, False, False]


@pytest.mark.parametrize(
    "error", [RefusedError(RefusalCode.STALE, "stale"), OlderServerError("old"), DilocoError("bug")]
)
def test_what_does_not_pass_is_tried_once(error: DilocoError) -> None:
    tries = []

    def call(attempts: Attempts) -> None:
        tries.append(attempts.number)
        raise error

    with pytest.raises(type(error)):
        retried(call, QUICK, threading.Event())
    assert tries == [1]


def test_progress_counts_anew_but_the_same_bytes_again_do_not() -> None:
    reached = iter([10, 20, 20, 10, 20, 20, 20])
    tries = []

    def call(attempts: Attempts) -> None:
        attempts.reached(next(reached))
        tries.append(attempts.number)
        raise UnreachableError("broken")

    with pytest.raises(UnreachableError):
        retried(call, QUICK, threading.Event())
    assert tries == [1, 2, 3, 4]


def test_the_first_answer_ends_it() -> None:
    def call(attempts: Attempts) -> int:
        if attempts.number < 3:
            raise UnreachableError("not yet")
        return attempts.number

    assert retried(call, QUICK, threading.Event()) == 3


def test_a_deadline_follows_size_and_measured_pace() -> None:
    settings = ClientSettings(call_s=10, deadline_factor=4, first_rate_bytes_s=1e6)
    pace = TransferPace(settings)
    assert pace.deadline_s(0) == 10
    assert pace.deadline_s(25_000_000) == 10 + 4 * 25
    for _ in range(30):
        pace.observe(100_000_000, 1.0)
    assert pace.rate_bytes_s == pytest.approx(1e8, rel=1e-3)
    assert pace.deadline_s(25_000_000) == pytest.approx(11, rel=1e-2)
    pace.observe(2_000_000, 20.0)
    assert pace.deadline_s(25_000_000) > 11.9
    assert pace.deadline_s(1 << 60) < BULK_DEADLINE_LIMIT_S


def test_a_few_bytes_say_nothing_about_pace() -> None:
    pace = TransferPace(ClientSettings())
    before = pace.rate_bytes_s
    pace.observe(1000, 5.0)
    pace.observe(1 << 30, 0.0)
    assert pace.rate_bytes_s == before
