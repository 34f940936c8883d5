from __future__ import annotations

import subprocess
import sys
import time

import pytest

from fragments.errors import SettingsError, UnreachableError
from services.client.status import fetch_status, watch_status
from tests.services.conftest import Site


def test_the_status_costs_no_jax(site: Site) -> None:
    code = (
        "import sys\n"
        "from services.client.status import fetch_status\n"
        "import services.client, services.outer.server, services.health\n"
        f"print(fetch_status({site.address!r}).run_id)\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('jax', 'optax')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n")[:2] == ["run-1", "[]"]


def test_the_status_is_what_the_server_says(site: Site) -> None:
    assert fetch_status(site.address) == site.outer.status()


def test_nobody_there_is_one_sentence_in_bounded_time() -> None:
    began_s = time.monotonic()
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9 cannot be reached.*diloco serve"):
        fetch_status("127.0.0.1:9", timeout_s=2)
    with pytest.raises(UnreachableError, match="watching the status"):
        next(watch_status("127.0.0.1:9"))
    assert time.monotonic() - began_s < 10


def test_silence_is_not_waited_for() -> None:
    """A port that accepts and says nothing: the deadline ends it."""
    import socket

    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        pytest.raises(UnreachableError, match=r"did not answer in time|cannot be reached"),
    ):
        fetch_status(f"127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.5)


def test_a_malformed_address_is_said_before_any_call() -> None:
    with pytest.raises(SettingsError, match="no port"):
        fetch_status("localhost")
    with pytest.raises(SettingsError, match="no port"):
        next(watch_status("localhost"))
