"""Places on this machine that are joined by thin links: network namespaces of the Linux kernel.

Each site has a network stack of its own, one address, and one device whose traffic the kernel holds
to a rate in both directions; all devices are joined by a switch in a namespace of its own, directly
or over a delay line (`harness.delayline`). What runs at a site is an ordinary process with ordinary
TCP, so that any program can be measured there. There is no way out of it, and nothing of the
machine's own network is touched.

A namespace has no name and no file: it lives as long as a process is in it. The one that holds it
ends when whoever made the sites does, in whatever way, so the kernel removes all of it then.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fragments.errors import DilocoError, SettingsError
from harness.environment import child_environment, module
from harness.shaping import shape_words

_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
_NETWORK = "10.77.0"
_FIRST_NUMBER = 2
_DEVICE = "eth0"
_SWITCH = "switch"
_MOST_SITES = 32
_CALL_S = 20.0
DELAYED_BY = "a process in user space for each link, which forwards the frames of a veth pair later"
"""How a delay is made, in words for a report."""


def why_no_sites() -> str:
    """Why no sites can be made here, in a sentence; empty where they can."""
    if sys.platform != "linux":
        return "links are shaped in network namespaces, which only Linux has"
    if os.geteuid() != 0:
        return "links are shaped in network namespaces, which takes root: run it with sudo"
    missing = {package for program, package in _PROGRAMS.items() if shutil.which(program) is None}
    if missing:
        return f"links are shaped with programs that are missing: install {', '.join(missing)}"
    told = _call(["unshare", "--net", "--uts", "--", "true"])
    if told.returncode != 0:
        return f"no network namespace can be made here: {_sentence(told)}"
    return ""


@dataclass(frozen=True, slots=True)
class _Site:
    number: int
    holder: subprocess.Popen[bytes]
    is_delayed: bool

    @property
    def address(self) -> str:
        return f"{_NETWORK}.{self.number}"

    @property
    def port(self) -> str:
        """The far end of its device, which shapes what the site receives."""
        return f"port{self.number}"

    @property
    def at_switch(self) -> str:
        """The device at the switch: that one, or, beyond a delay line, one of its own."""
        return f"line{self.number}" if self.is_delayed else self.port


class Sites:
    """Sites of the given names, all of whose links are open at first. A context manager.

    `delay_ms`: from any site to any other, one way; half of it on the link of each. Not
    thread-safe. The processes at a site must be ended by whoever started them, before this is.

    Raises:
        SettingsError: where sites cannot be made; the message says why.
    """

    def __init__(self, names: Iterable[str], delay_ms: float = 0.0) -> None:
        self._names, self._link_delay_s = list(names), delay_ms / 2000
        self._sites: dict[str, _Site] = {}
        self._delay_lines: dict[str, subprocess.Popen[bytes]] = {}
        self._switch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sites:
        if reason := why_no_sites():
            raise SettingsError(reason)
        if len(self._names) > _MOST_SITES:
            raise SettingsError(f"{len(self._names)} sites are more than {_MOST_SITES}")
        try:
            self._switch = _hold(_SWITCH)
            # One that asks nobody for multicast groups.
            self._at_switch("ip", "link", "add", _SWITCH, "type", "bridge", "mcast_snooping", "0")
            self._at_switch("ip", "link", "set", _SWITCH, "up")
            for number, name in enumerate(self._names, start=_FIRST_NUMBER):
                self._add(name, number)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._close()

    def address(self, name: str) -> str:
        """The site's only address. It is its host name too, which programs look up to be found."""
        return self._sites[name].address

    def words(self, name: str) -> tuple[str, ...]:
        """What goes before the words of a command so that it runs at the site."""
        return _inside(self._sites[name].holder)

    def shape(self, name: str, rate_mbit: float) -> None:
        """From here on the site sends and receives `rate_mbit` (10^6 bits a second) each way."""
        site = self._sites[name]
        self._at_site(name, *shape_words(_DEVICE, rate_mbit))
        self._at_switch(*shape_words(site.port, rate_mbit))

    def cut(self, name: str) -> None:
        """Nothing comes or goes any more, and nobody is told."""
        self._at_switch("ip", "link", "set", self._sites[name].at_switch, "nomaster")

    def mend(self, name: str) -> None:
        """The end of a cut."""
        self._at_switch("ip", "link", "set", self._sites[name].at_switch, "master", _SWITCH)

    def require_alive(self) -> None:
        """To be asked again and again while something is measured.

        Raises:
            DilocoError: when a process that a link depends on has ended: the link is cut since.
        """
        for what, process in self._processes():
            if (code := process.poll()) is not None:
                raise DilocoError(f"{what} has ended (exit code {code}), so a link is cut")

    def round_trip_s(self, one: str, other: str) -> float:
        """Measured, between two sites."""
        told = _checked([*self.words(one), *module("harness.roundtrip", self.address(other))])
        return float(told.stdout)

    def carried_bytes(self, name: str) -> tuple[int, int]:
        """Bytes that the site has sent and received so far, with most headers."""
        devices = Path(f"/proc/{self._sites[name].holder.pid}/net/dev").read_text("ascii")
        (line,) = (line for line in devices.splitlines() if line.strip().startswith(f"{_DEVICE}:"))
        counts = line.partition(":")[2].split()
        return int(counts[8]), int(counts[0])

    def _add(self, name: str, number: int) -> None:
        address = f"{_NETWORK}.{number}"
        holder = _hold(address)
        site = self._sites[name] = _Site(number, holder, self._link_delay_s > 0)
        peer = ("peer", "name", _DEVICE, "netns", str(holder.pid))
        self._at_switch("ip", "link", "add", site.port, "type", "veth", *peer)
        self._at_switch("ip", "link", "set", site.port, "up")
        if site.is_delayed:
            self._delay(name, site)
        self._at_switch("ip", "link", "set", site.at_switch, "master", _SWITCH, "up")
        self._at_site(name, "ip", "address", "add", f"{address}/24", "dev", _DEVICE)
        self._at_site(name, "ip", "link", "set", _DEVICE, "up")

    def _delay(self, name: str, site: _Site) -> None:
        """Begins the delay line between the site's device and the one at the switch."""
        assert self._switch is not None
        end = f"end{site.number}"
        self._at_switch("ip", "link", "add", site.at_switch, "type", "veth", "peer", "name", end)
        self._at_switch("ip", "link", "set", end, "up")
        words = module("harness.delayline", site.port, end, str(self._link_delay_s))
        self._delay_lines[name] = _started([*_inside(self._switch), *words])

    def _at_switch(self, *words: str) -> None:
        assert self._switch is not None
        _checked([*_inside(self._switch), *words])

    def _at_site(self, name: str, *words: str) -> None:
        _checked([*self.words(name), *words])

    def _processes(self) -> list[tuple[str, subprocess.Popen[bytes]]]:
        """All that hold a part of the network, each with what it is."""
        lines = [(f"the delay line of {name}", line) for name, line in self._delay_lines.items()]
        holders = [(f"the process that holds {n}", site.holder) for n, site in self._sites.items()]
        switch = [("the process that holds the switch", self._switch)] if self._switch else []
        return [*lines, *holders, *switch]

    def _close(self) -> None:
        for _what, each in self._processes():
            assert each.stdin is not None
            assert each.stdout is not None
            each.stdin.close()
            each.wait(_CALL_S)
            each.stdout.close()
        self._sites, self._delay_lines, self._switch = {}, {}, None


def _hold(host_name: str) -> subprocess.Popen[bytes]:
    """A process in a namespace of its own, which ends when its stdin does; it is ready.

    The host name is in a namespace too: programs that look up their own (Gloo) find the address.
    Devices that come later have no IPv6, where the kernel has it: nothing here uses it, and the
    kernel's own solicitations would be traffic on the links.
    """
    no_ipv6 = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
    work = (
        f"echo {host_name} > /proc/sys/kernel/hostname && ip link set lo up"
        f" && if test -e {no_ipv6}; then echo 1 > {no_ipv6}; fi && echo && exec cat"
    )
    return _started(["unshare", "--net", "--uts", "--", "sh", "-c", work])


def _started(argv: list[str]) -> subprocess.Popen[bytes]:
    """A process that has said a line on its stdout, and ends when its stdin does."""
    pipe = subprocess.PIPE
    started = subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, start_new_session=True, env=child_environment()
    )
    assert started.stdin is not None
    assert started.stdout is not None
    if not started.stdout.readline():
        started.stdin.close()
        started.stdout.close()
        started.wait(_CALL_S)
        raise SettingsError("a site could not be made; what is above says why")
    return started


def _inside(holder: subprocess.Popen[bytes]) -> tuple[str, ...]:
    return ("nsenter", "--target", str(holder.pid), "--net", "--uts", "--")


def _call(argv: list[str]) -> subprocess.CompletedProcess[str]:
    environ = child_environment()
    return subprocess.run(argv, capture_output=True, text=True, timeout=_CALL_S, env=environ)


def _checked(argv: list[str]) -> subprocess.CompletedProcess[str]:
    told = _call(argv)
    if told.returncode != 0:
        words = " ".join(argv[argv.index("--") + 1 :])
        raise SettingsError(f"a link could not be made: `{words}` says {_sentence(told)}")
    return told


def _sentence(told: subprocess.CompletedProcess[str]) -> str:
    return " ".join(told.stderr.split()) or f"exit code {told.returncode}"
