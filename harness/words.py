"""Quantities as a person reads them."""

from __future__ import annotations

import math

_STEPS = (("G", 1e9), ("M", 1e6), ("k", 1e3))


def count_text(count: float) -> str:
    """1234567 as "1.23M", 950 as "950"."""
    for suffix, unit in _STEPS:
        if count >= unit:
            return f"{count / unit:.3g}{suffix}" if count < 1000 * unit else f"{count / unit:.0f}G"
    return f"{count:.0f}"


def bytes_text(count: float) -> str:
    """1234567 as "1.23 MB" (powers of ten, as link rates are)."""
    for suffix, unit in _STEPS:
        if count >= unit:
            return f"{count / unit:.3g} {suffix}B"
    return f"{count:.0f} B"


def rate_text(use_mbit: float, cap_mbit: float) -> str:
    """Mbit/s in use as "9.8 of 10", or "9.8" where `cap_mbit` is 0: no cap."""
    use = f"{use_mbit:.1f}" if use_mbit < 100 else f"{use_mbit:.0f}"
    return f"{use} of {cap_mbit:g}" if cap_mbit > 0 else use


def loss_text(loss: float) -> str:
    """Three decimals; a dash where nothing is known."""
    return "-" if math.isnan(loss) else f"{loss:.3f}"


def share_text(share: float) -> str:
    """0.0012 as "0.12%"."""
    return f"{share * 100:.2f}%"


def duration_text(seconds: float) -> str:
    """75 as "1:15"."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}"


def sparkline(values: list[float], width: int) -> str:
    """The last `width` values as a row of bars, lowest to highest; empty for no value."""
    bars = "▁▂▃▄▅▆▇█"
    recent = [value for value in values if math.isfinite(value)][-width:]
    if not recent:
        return ""
    low, high = min(recent), max(recent)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((value - low) * scale)] for value in recent)
