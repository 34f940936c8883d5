"""A container's link is shaped from outside it, in both directions.

The container is a namespace at the end of a cable, as an engine makes them, and its host is a site.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fragments.errors import DilocoError
from harness.containers import shape_container
from harness.environment import child_environment
from harness.sites import Sites
from tests.support.sites import require_sites

SHAPE = "from harness.containers import shape_container as shape; shape({}, {})"


@contextmanager
def _container(host: tuple[str, ...]) -> Iterator[int]:
    """The process id of one on that host, whose end of the cable is called cable."""
    pipe = subprocess.PIPE
    argv = [*host, "unshare", "--net", "--", "sh", "-c", "echo && exec cat"]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        peer = ("peer", "name", "eth0", "netns", str(holder.pid))
        argv = [*host, "ip", "link", "add", "cable", "type", "veth", *peer]
        subprocess.run(argv, check=True)
        yield holder.pid
        assert holder.stdin is not None
        holder.stdin.close()


def _told(*argv: str) -> str:
    return subprocess.run(
        argv, check=True, capture_output=True, text=True, env=child_environment()
    ).stdout


def test_both_ends_of_the_cable_hold_the_rate_and_may_be_told_another() -> None:
    require_sites()
    with Sites(["host"]) as sites, _container(sites.words("host")) as pid:
        host, inside = sites.words("host"), ("nsenter", "--target", str(pid), "--net", "--")
        for rate_mbit in (20, 5):
            _told(*host, sys.executable, "-c", SHAPE.format(pid, rate_mbit))
            for shaped in ((*host, "tc", "qdisc", "show", "dev", "cable"),
                           (*inside, "tc", "qdisc", "show", "dev", "eth0")):  # fmt: skip
                assert "tbf" in (told := _told(*shaped))
                assert f"rate {rate_mbit}Mbit" in told


def test_what_has_no_such_device_is_told_so() -> None:
    require_sites()
    with (
        Sites(["alone"]) as sites,
        pytest.raises(DilocoError, match=r"a container's link: .* says .*eth7"),
    ):
        shape_container(int(sites.words("alone")[2]), 10, device="eth7")
