"""Links of containers, shaped and cut from the host, as root; the container needs no privilege.

The host enters the network namespace of a container's process for what the container sends, and
shapes the host's end of the same cable for what it receives.
"""

from __future__ import annotations

import re
import subprocess

from fragments.errors import DilocoError
from harness.shaping import shape_words

_CALL_S = 30.0
_PEER = re.compile(r"^\d+: \S+?@if(\d+):", re.MULTILINE)
_LINK = re.compile(r"^(\d+): ([^:@\s]+)", re.MULTILINE)


def shape_container(pid: int, rate_mbit: float, device: str = "eth0") -> None:
    """From here on the container whose first process is `pid` sends and receives at most
    `rate_mbit` (10^6 bits a second) over `device`, each way.

    After a cut and a mend the device is a new one, and must be shaped again.

    Raises:
        DilocoError: where there is no such device, or the kernel refuses.
    """
    inside = ("nsenter", "--target", str(pid), "--net", "--")
    peer = _PEER.search(_told(*inside, "ip", "-o", "link", "show", "dev", device))
    links = dict(_LINK.findall(_told("ip", "-o", "link", "show")))
    if peer is None or peer[1] not in links:
        raise DilocoError(f"{device} of process {pid} has no other end on this machine")
    _told(*inside, *shape_words(device, rate_mbit))
    _told(*shape_words(links[peer[1]], rate_mbit))


def cut_container(container: str, network: str) -> None:
    """Takes the container off the network: nothing comes or goes, and nobody is told."""
    _told("docker", "network", "disconnect", network, container)


def mend_container(container: str, network: str, alias: str) -> None:
    """Undoes `cut_container`; the others find it under `alias` again."""
    _told("docker", "network", "connect", "--alias", alias, network, container)


def _told(*words: str) -> str:
    try:
        told = subprocess.run(words, capture_output=True, text=True, timeout=_CALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DilocoError(f"a container's link: `{words[0]}` cannot be asked: {error}") from error
    if told.returncode != 0:
        raise DilocoError(f"a container's link: `{' '.join(words)}` says {told.stderr.strip()}")
    return told.stdout
