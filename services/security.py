"""Which addresses may be served, and how HOST:PORT is written."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple
from urllib.parse import unquote

from fragments.errors import SettingsError


class Address(NamedTuple):
    """A host (name or literal, IPv6 without brackets) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """HOST:PORT or [IPV6]:PORT; port 0 means "any free one". SettingsError for anything else."""
    host, colon, port_text = text.strip().rpartition(":")
    if not colon:
        raise SettingsError(f"address {text!r} has no port: write HOST:PORT, like 127.0.0.1:7700")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise SettingsError(f"address {text!r}: write an IPv6 host in brackets, like [::1]:7700")
    if not host or any(letter.isspace() or letter in "/[]*" for letter in host):
        raise SettingsError(f"address {text!r} has no usable host: write HOST:PORT")
    if not (port_text.isascii() and port_text.isdigit() and int(port_text) <= 65535):
        raise SettingsError(f"address {text!r}: the port must be a number from 0 to 65535")
    return Address(host, int(port_text))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`.

    Names other than localhost count as reachable from elsewhere: what they resolve to can change.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_near(peer: str) -> bool:
    """Whether the peer of a call, as gRPC names it (`ipv4:127.0.0.1:5001`), is on this machine."""
    kind, _, place = peer.partition(":")
    if kind in ("unix", "unix-abstract"):
        return True
    host = unquote(place.rpartition(":")[0]).strip("[]").partition("%")[0]
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    # A socket for both families names a peer of IPv4 so.
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)


def check_bind(address: str, insecure: bool) -> Address:
    """The parsed address, if it may be served.

    Raises SettingsError for a malformed address, and for one that others can reach unless the
    caller said `insecure`.
    """
    parsed = parse_address(address)
    if not insecure and not is_loopback(parsed.host):
        raise SettingsError(
            f"{parsed} can be reached from other machines, and there are no certificates yet: "
            "anyone there could join the run or read its weights. Serve 127.0.0.1 (and reach it "
            "through a tunnel), or accept that with --insecure on a network you trust"
        )
    return parsed
