"""Goodput under the same kills: Decoupled DiLoCo, synchronous DiLoCo, data-parallel training."""
