"""For every test of this room: strict jax promotion, repeatable hypothesis."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.monitoring
import pytest
from hypothesis import settings

# A first example compiles, so its time says nothing: no deadline.
settings.register_profile("fragments", deadline=None, derandomize=True)
settings.load_profile("fragments")


@pytest.fixture(autouse=True)
def strict_promotion() -> Iterator[None]:
    """No implicit dtype or rank promotion."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="session")
def compilations() -> list[str]:
    """Grows by one entry with each program that XLA compiles from now on."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(f"{duration_secs:.3f} s {kwargs}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seen
