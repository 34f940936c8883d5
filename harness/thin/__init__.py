"""`diloco bench links`: Decoupled DiLoCo and data-parallel training over the same thin links."""
