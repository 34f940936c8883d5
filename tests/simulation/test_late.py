from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fragments.payload import Payload, decode_int8, encode_int8
from fragments.quantize import dequantize, quantize, valid_counts
from fragments.records import ContributionKey, Receipt, Version
from outer_server.core.step import FragmentParameters
from simulation.late import AgainstCurrent
from tests.support.tiny import tiny_birth, tiny_spec

SPEC = tiny_spec(codec={"block": 8, "step_fraction_up": 0.01})
LAYOUT = tiny_birth(SPEC)[0]
PART = LAYOUT.fragments[0]


def _value(number: float) -> jnp.ndarray:
    """That number at every place that is not padding."""
    counts = valid_counts(PART, LAYOUT.rows_padded)
    filled = np.arange(LAYOUT.block)[None, :] < counts[:, None]
    return jnp.asarray(np.where(filled, np.float32(number), np.float32(0)))


def _encode(value: jnp.ndarray) -> Payload:
    valid = jnp.asarray(valid_counts(PART, LAYOUT.rows_padded))
    made = quantize(value, valid, SPEC.codec.step_fraction_up)
    return encode_int8(PART, np.asarray(made.codes), np.asarray(made.step_bits))


def _receipt(version: int) -> Receipt:
    return Receipt(ContributionKey("a", 0, Version(1, version)), late=True)


def test_base_minus_local_becomes_current_minus_local() -> None:
    late = AgainstCurrent(SPEC, LAYOUT)
    late.superseded(0, 3, _value(10.0))
    published = [FragmentParameters(_value(14.0), _value(14.0), ())]
    # base 10, local 9, current 14: 10 - 9 = 1 becomes 14 - 9 = 5.
    payload = late.to_merge(_receipt(3), _encode(_value(1.0)), published)
    got = dequantize(*decode_int8(PART, LAYOUT.rows_padded, payload))
    np.testing.assert_allclose(np.asarray(got), np.asarray(_value(5.0)), rtol=0.02)


def test_a_late_one_on_the_current_base_and_one_beyond_the_bound_stay_as_they_are() -> None:
    late = AgainstCurrent(SPEC, LAYOUT)
    for version in range(8):
        late.superseded(0, version, _value(float(version)))
    published = [FragmentParameters(_value(9.0), _value(9.0), ())]
    payload = _encode(_value(1.0))
    assert late.to_merge(_receipt(8), payload, published) is payload
    assert late.to_merge(_receipt(0), payload, published) is payload
    assert late.to_merge(_receipt(7), payload, published) != payload
