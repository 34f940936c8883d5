"""`diloco serve` with traps: an outer server that kills itself at named points, and whose disk is
full, when told so.

    python -m harness.chaos.server TRAP FULL ROUNDS serve RUN_DIR --address ADDRESS ...

TRAP is the file of a `harness.chaos.points.Trap`, FULL that which fills the disk
(`harness.chaos.full_disk`); a snapshot is written every ROUNDS merged rounds.
The words after that are those of `diloco serve`, as far as a chaos run gives them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from fragments.errors import DilocoError
from fragments.records import Contribution, Lease, Receipt
from harness.chaos.full_disk import FillableDisk
from harness.chaos.points import Deed, Point, Trap, TrappedDisk
from harness.environment import use_server_arithmetic

if __name__ == "__main__":
    # Before anything below imports jax.
    use_server_arithmetic(os.environ)

from outer_server.saver import SnapshotRule
from outer_server.server import OuterServer
from services.outer.server import OuterServices
from services.settings import ServerSettings

LOOK_S = 0.5
"""How often the server is looked after."""


class _Outer(OuterServer):
    """Passes a point between applying a contribution and acknowledging it."""

    trap: Trap

    def contribute(self, lease: Lease, contribution: Contribution) -> Receipt:
        """See `OuterServer`."""
        receipt = super().contribute(lease, contribution)
        self.trap.pass_by(Point(Deed.ACKNOWLEDGE, is_after=False))
        return receipt


def serve(asked: argparse.Namespace, stop: threading.Event) -> None:
    """Serves until `stop` is set, or the trap springs.

    Raises:
        DilocoError: when the run cannot be served, or the server has failed.
    """
    trap = Trap(asked.trap)
    outer = _Outer(
        asked.run_dir,
        SnapshotRule(every_rounds=asked.every_rounds),
        disk=TrappedDisk(trap, asked.run_dir, FillableDisk(asked.full)),
        keep_snapshots=asked.keep_snapshots,
    )
    outer.trap = trap
    settings = ServerSettings(
        address=asked.address, bulk_port=asked.bulk_port, insecure=asked.insecure
    )
    with outer:
        services = OuterServices(outer, settings)
        services.start()
        try:
            place = {"address": str(services.address), "bulk_port": services.ports.bulk}
            part = asked.run_dir / ".address.json.part"
            part.write_text(json.dumps(place) + "\n", encoding="utf-8")
            part.replace(asked.run_dir / "address.json")
            while not stop.wait(LOOK_S):
                if outer.failed:
                    raise DilocoError("the server has failed: its log above says why")
        finally:
            services.stop()


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m harness.chaos.server")
    parser.add_argument("trap", type=Path)
    parser.add_argument("full", type=Path)
    parser.add_argument("every_rounds", type=int)
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--address", required=True)
    parser.add_argument("--bulk-port", type=int, required=True)
    parser.add_argument("--keep-snapshots", type=int, required=True)
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--exit-with-parent", action="store_true")
    parser.add_argument("--log-format", choices=["json"])
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    """Serves until SIGTERM, or until whoever started it is gone."""
    asked, stop = _parse(words), threading.Event()

    def await_parent() -> None:
        sys.stdin.buffer.read()
        stop.set()

    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    if asked.exit_with_parent:
        threading.Thread(target=await_parent, daemon=True).start()
    try:
        serve(asked, stop)
    except DilocoError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
