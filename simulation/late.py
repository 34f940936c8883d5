"""Late contributions taken against the server's current value instead of their own base.

What a late learner sends is base - local. Where the server has moved on from that base, the rule of
production adds it as it is, so that it repeats in part what others have done meanwhile; taken
against the current value, current - local, it pulls towards where the learner is. In the
simulation only, for the study to compare.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float32

from fragments.codec import Codec
from fragments.layout import Layout
from fragments.payload import Payload
from fragments.quantize import dequantize, valid_counts
from fragments.records import Receipt
from fragments.runspec import RunSpec
from outer_server.core.step import FragmentParameters


class AgainstCurrent:
    """Turns base - local of late contributions into current - local.

    It keeps the broadcast copies that were replaced, as far back as the staleness bound reaches.
    Shape letters: B rows, N values a row.
    """

    def __init__(self, spec: RunSpec, layout: Layout) -> None:
        self._spec = spec
        self._layout = layout
        self._codec = Codec.of(spec.codec)
        self._values: dict[tuple[int, int], Float32[Array, "B N"]] = {}

    def superseded(self, fragment: int, version: int, value_BxN: Float32[Array, "B N"]) -> None:
        """`version` of a fragment, whose broadcast copy was `value_BxN`, has a successor."""
        self._values[fragment, version] = value_BxN
        self._values.pop((fragment, version - 1 - self._spec.staleness_bound), None)

    def to_merge(
        self, receipt: Receipt, payload: Payload, published: Sequence[FragmentParameters]
    ) -> Payload:
        """An accepted late payload against the current broadcast copy, quantized again; as it is
        where its base is current, or where the difference is too large to encode.
        """
        index = receipt.key.fragment
        base_BxN = self._values.get((index, receipt.key.base_version.number))
        if base_BxN is None:
            return payload
        part, rows = self._layout.fragments[index], self._layout.rows_padded
        codes_BxN, step_bits_B = self._codec.decode(part, rows, payload)
        moved_BxN = published[index].broadcast_BxN - base_BxN
        quantized = self._codec.reduce(
            moved_BxN + dequantize(codes_BxN, step_bits_B),
            jnp.asarray(valid_counts(part, rows)),
            self._spec.codec.step_fraction_up,
        )
        if not bool(quantized.finite):
            return payload
        return self._codec.encode(part, quantized.codes, quantized.step_bits)
