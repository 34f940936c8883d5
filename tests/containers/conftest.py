"""The image that the tests run; without an engine a clear skip, and in CI a failure."""

from __future__ import annotations

import os

import pytest

from harness.engine import why_no_engine
from tests.containers.engine import build_image


@pytest.fixture(scope="session")
def image() -> str:
    """The image named by IMAGE, or one that is built now."""
    reason = why_no_engine()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; CI must have one")
    if reason:
        # A laptop without an engine: the reason names the part that is missing.
        pytest.skip(reason)
    if named := os.environ.get("IMAGE"):
        return named
    build_image("decoupled-diloco:test")
    return "decoupled-diloco:test"
