"""What the kernel is told to hold a network device to a rate.

The token bucket filter (tc-tbf) bounds what a device sends. Its bucket holds one millisecond of the
rate, so that an idle link saves up nothing to speak of, and its queue is that of `harness.link`.
Whatever is larger than the bucket (the kernel hands down up to 64 KiB at once) it cuts to packets.
"""

from __future__ import annotations

from services.shaper import bytes_s

QUEUE_BYTES = 256 << 10
_BUCKET_S = 0.001
_SMALLEST_BUCKET_BYTES = 8 << 10
"""Some full packets."""


def shape_words(device: str, rate_mbit: float) -> tuple[str, ...]:
    """`tc` and its arguments: from here on `device` sends at most `rate_mbit` (10^6 bits a
    second), headers of TCP, IP and Ethernet counted. Replaces what it was told before.
    """
    bucket_bytes = max(_SMALLEST_BUCKET_BYTES, round(bytes_s(rate_mbit) * _BUCKET_S))
    rate = f"{round(rate_mbit * 1e6)}bit"
    shape = ("rate", rate, "burst", str(bucket_bytes), "limit", str(QUEUE_BYTES))
    return ("tc", "qdisc", "replace", "dev", device, "root", "tbf", *shape)
