"""The network between regions as one process: a link for each, by a map that may change meanwhile.

    python -m harness.wan MAP HOST:PORT... [--carried FILE] [--while-held FILE]

It listens on each of these ports, on every address, and relays to that port of HOST. Who dials is
told by the address that it dials from, for each region is a host of its own, found by its name:
containers on one network, or machines. Others are refused. When the map's file changes, links get
the rates, delays and cuts that it says then, also those that carry something.

FILE of `--carried` gets what each link has carried, up and down. A process with `--while-held` ends
when nobody holds a lock on that FILE any more, however its holder has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from fragments.errors import DilocoError, SettingsError
from harness.link import Link
from harness.regions import MOST_REGIONS, Region, RegionMap, load_map
from services.security import parse_address

POLL_S = 0.1
"""How soon a change of the map is noticed."""

_TELL_EVERY = 5
"""Looks at the map from one account of the bytes to the next."""

Find = Callable[[str], Awaitable[set[str]]]
"""From a region's name to the addresses that it dials from; none where it is not there."""

Say = Callable[[str], None]


async def by_name(region: str) -> set[str]:
    """A `Find`: what the name server says."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(region, None, family=socket.AF_INET)
    except OSError:
        return set()
    return {str(address[0]) for *_rest, address in found}


class Wan:
    """Links by region. A context manager; `follow` is called often, by one thread.

    Raises:
        SettingsError: where there is no map in the file.
        OSError: where a port is taken.
    """

    def __init__(
        self,
        map_path: Path,
        targets: Sequence[tuple[str, int]],
        say: Say,
        find: Find = by_name,
        ports: Sequence[int] | None = None,
    ) -> None:
        self._path, self._say, self._find = map_path, say, find
        self._links: dict[str, Link] = {}
        self._regions: dict[str, Region] = {}
        self._seen = self._stamp()
        self._apply(load_map(map_path))
        self._loop = asyncio.new_event_loop()
        self._doors: list[socket.socket] = []
        for port in ports or [port for _host, port in targets]:
            door = socket.create_server(("", port))
            door.setblocking(False)
            self._doors.append(door)
        self._work = self._loop.create_task(self._accept_all(targets))
        self._thread = threading.Thread(target=self._attend, name="wan")
        self._thread.start()

    def __enter__(self) -> Wan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._work.cancel)
        self._thread.join()
        for link in self._links.values():
            link.close()

    @property
    def ports(self) -> list[int]:
        """Where it listens, one for each target."""
        return [int(door.getsockname()[1]) for door in self._doors]

    def carried_bytes(self) -> dict[str, tuple[int, int]]:
        """What each region's link has carried, up and down."""
        return {name: link.carried_bytes for name, link in self._links.items()}

    def follow(self) -> None:
        """Takes up what the map says, if that has changed; one that cannot be read changes
        nothing.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._apply(load_map(self._path))
        except SettingsError as error:
            self._say(f"all links stay as they are: {error}")

    def _stamp(self) -> tuple[int, int, int]:
        with contextlib.suppress(OSError):
            found = self._path.stat()
            return found.st_ino, found.st_mtime_ns, found.st_size
        return 0, 0, 0

    def _apply(self, regions: RegionMap) -> None:
        for name, region in regions.regions.items():
            if self._regions.get(name) == region:
                continue
            self._say(f"{name}: {'cut off' if region.cut else region}")
            link = self._links.get(name) or Link("", region.shape)
            self._links[name] = link
            link.reshape(region.shape)
            if region.cut:
                link.cut()
            else:
                link.mend()
        for name in self._links.keys() - regions.regions.keys():
            self._say(f"{name}: no longer on the map")
            self._links.pop(name).close()
        self._regions = regions.regions

    def _attend(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._work)
        self._loop.close()
        for door in self._doors:
            door.close()

    async def _accept_all(self, targets: Sequence[tuple[str, int]]) -> None:
        # A look-up that nobody answers takes a thread for a while.
        self._loop.set_default_executor(ThreadPoolExecutor(MOST_REGIONS))
        async with asyncio.TaskGroup() as tasks:
            for door, target in zip(self._doors, targets, strict=True):
                tasks.create_task(self._accept(door, target, tasks))

    async def _accept(
        self, door: socket.socket, target: tuple[str, int], tasks: asyncio.TaskGroup
    ) -> None:
        while True:
            try:
                near, peer = await self._loop.sock_accept(door)
            except OSError as error:
                # Out of file descriptors, say: those who are let in already are not to suffer.
                self._say(f"nobody can be let in for the moment: {error}")
                await asyncio.sleep(POLL_S)
                continue
            tasks.create_task(self._admit(near, str(peer[0]), target))

    async def _admit(self, near: socket.socket, address: str, target: tuple[str, int]) -> None:
        region = await self._region_of(address)
        link = self._links.get(region or "")
        if link is None:
            self._say(f"{address} dials and is no region of the map: refused")
            near.close()
        else:
            try:
                link.carry(near, target)
            except RuntimeError:
                near.close()  # The region's link was closed meanwhile.

    async def _region_of(self, address: str) -> str | None:
        """Whoever is found at the address; the others are not waited for."""

        async def found(name: str) -> tuple[str, set[str]]:
            return name, await self._find(name)

        looks = [asyncio.ensure_future(found(name)) for name in list(self._links)]
        try:
            for look in asyncio.as_completed(looks):
                name, addresses = await look
                if address in addresses:
                    return name
            return None
        finally:
            for each in looks:
                each.cancel()


def _end_with_holder(path: Path) -> None:
    """Ends this process as soon as a lock on the file can be had."""
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
    os._exit(0)


def _write_carried(path: Path, wan: Wan) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(wan.carried_bytes()), encoding="utf-8")
    part.replace(path)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m harness.wan")
    parser.add_argument("map", type=Path)
    parser.add_argument("targets", nargs="+", metavar="HOST:PORT")
    parser.add_argument("--carried", type=Path)
    parser.add_argument("--while-held", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    """Carries until SIGTERM."""
    asked, stop = _parse(words), threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    if asked.while_held:
        threading.Thread(target=_end_with_holder, args=(asked.while_held,), daemon=True).start()
    try:
        targets = [(each.host, each.port) for each in map(parse_address, asked.targets)]
        with Wan(asked.map, targets, lambda line: print(line, flush=True)) as wan:  # noqa: T201  a container logs what it prints
            looks = 0
            while not stop.wait(POLL_S):
                wan.follow()
                if asked.carried and (looks := looks + 1) % _TELL_EVERY == 0:
                    _write_carried(asked.carried, wan)
    except (DilocoError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
