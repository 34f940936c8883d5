"""Synchronous data-parallel training over real processes: what Decoupled DiLoCo is held to."""
