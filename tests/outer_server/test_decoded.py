from __future__ import annotations

import numpy as np

from fragments.payload import Payload
from outer_server.decoded import Decoded


def _payload(data: bytes = b"x") -> Payload:
    return Payload("int8-rms-zstd/2", 1, 0, data)


def _encoded(rows: int, value: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.full((rows, 8), value, np.int8), np.zeros(rows, np.uint16)


def test_what_is_kept_is_taken_once_and_by_its_own_payload_only() -> None:
    decoded, payload, encoded = Decoded(1000), _payload(), _encoded(2)
    decoded.keep(payload, encoded)
    assert decoded.take(_payload()) is None
    assert decoded.take(payload) is encoded
    assert decoded.take(payload) is None


def test_the_oldest_leave_where_the_bound_is_reached() -> None:
    # Ten bytes a row.
    decoded, payloads = Decoded(50), [_payload() for _ in range(4)]
    for number, payload in enumerate(payloads):
        decoded.keep(payload, _encoded(2, number))
    found = [decoded.take(payload) for payload in payloads]
    assert [None if one is None else int(one[0][0, 0]) for one in found] == [None, None, 2, 3]


def test_what_is_larger_than_the_bound_is_not_kept() -> None:
    decoded, small, large = Decoded(50), _payload(), _payload()
    decoded.keep(small, _encoded(5))
    decoded.keep(large, _encoded(6))
    assert decoded.take(large) is None
    assert decoded.take(small) is not None
