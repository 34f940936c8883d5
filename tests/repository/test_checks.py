"""The checks that tests rely on are really on."""

import warnings

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from fragments.quantize import dequantize


def test_dtypes_are_not_promoted_silently() -> None:
    with pytest.raises(ValueError, match="promotion"):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.bfloat16)


def test_ranks_are_not_promoted_silently() -> None:
    with pytest.raises(ValueError, match="rank"):
        jnp.ones((2, 2)) + jnp.ones(2)


def test_annotated_shapes_are_checked_at_a_call() -> None:
    step_bits = np.zeros(3, np.uint16)
    with pytest.raises(jaxtyping.TypeCheckError):
        dequantize(jnp.zeros((2, 4), jnp.int8), jnp.asarray(step_bits))


def test_a_warning_is_an_error() -> None:
    with pytest.raises(UserWarning, match="seen"):
        warnings.warn("seen", stacklevel=1)
