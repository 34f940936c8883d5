"""What tests need to use network namespaces: a skip that says why, and in CI a failure."""

from __future__ import annotations

import os

import pytest

from harness.sites import why_no_sites


def require_sites() -> None:
    """Skips the test where no sites can be made; fails it where REQUIRE_SITES says there must."""
    reason = why_no_sites()
    if reason and os.environ.get("REQUIRE_SITES") == "true":
        pytest.fail(f"{reason}; CI must be able to")
    if reason:
        # A laptop without root: the reason says what is missing.
        pytest.skip(reason)
