"""One direction of a learner's line: payloads follow one another and take their time."""

from __future__ import annotations

from collections.abc import Callable

from simulation.clock import Order, VirtualClock

BITS_PER_MBIT = 1e6


class Pipe:
    """Carries payloads in order.

    Args:
        clock: the run's.
        mbit_s: bandwidth, None for unlimited.
        fixed_s: seconds that every payload takes, whatever its size; None to go by `mbit_s`.
        latency_s: added to each, one way.
    """

    def __init__(
        self, clock: VirtualClock, mbit_s: float | None, fixed_s: float | None, latency_s: float
    ) -> None:
        self._clock = clock
        self._mbit_s = mbit_s
        self._fixed_s = fixed_s
        self._latency_s = latency_s
        self._free_at_s = 0.0
        self.bytes_carried = 0

    def transfer_s(self, wire_bytes: int) -> float:
        """Seconds that a payload occupies the line."""
        if self._fixed_s is not None:
            return self._fixed_s
        return 0.0 if self._mbit_s is None else wire_bytes * 8 / (self._mbit_s * BITS_PER_MBIT)

    def send(self, wire_bytes: int, deliver: Callable[[], None]) -> None:
        """Call `deliver` once the payload has arrived whole."""
        begins_s = max(self._clock.now_s, self._free_at_s)
        self._free_at_s = begins_s + self.transfer_s(wire_bytes)
        self.bytes_carried += wire_bytes
        self._clock.at(self._free_at_s + self._latency_s, Order.ARRIVAL, deliver)

    def reset(self) -> None:
        """The line was cut: nothing occupies it any more. Its user drops what is under way."""
        self._free_at_s = self._clock.now_s
