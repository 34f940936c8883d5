"""No push, however made, crashes the server, changes its state unduly or makes it allocate."""

from __future__ import annotations

import pytest

from tests.soak.campaign import campaign
from tests.soak.cases import KINDS

CASES = 5000


@pytest.mark.timeout(300)
def test_every_push_is_answered_and_none_does_harm() -> None:
    """The promises are checked case by case in `campaign`; here, that all kinds were sent, and that
    each way to answer was needed.
    """
    tally = campaign(seed=0, numbers=range(CASES), measured_every=4)
    assert tally.cases == CASES
    assert set(tally.kinds) >= set(KINDS)
    assert set(tally.runs) == {"int8", "f32", "bf16"}
    assert {"receipt", "BAD_PAYLOAD", "MISMATCH", "DATA_LOSS", "LEASE_LOST"} <= set(tally.answers)
