"""What every test runs under: strict JAX, one thread a computation, and repeatable examples.

The environment is set here, before any test imports jax, and children that tests start inherit it.
"""

import os

from hypothesis import settings

os.environ.update(
    {
        # An accidental float64 or a silent broadcast is a bug here: the bits of every learner and
        # of the server must be equal.
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_PLATFORMS": "cpu",
    }
)

# The same examples at every run, however slow the machine; the timeout of each test is the bound.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
