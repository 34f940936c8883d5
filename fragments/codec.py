"""How differences of fragment values travel: pseudo-gradients up, outer updates down.

Every kind gives symbols and a step for each block, whose products are the difference: int8 symbols
at a step of c RMS ("int8") or absmax/127 ("absmax"), or, to compare with, the values themselves at
a step of 1, rounded to bfloat16 ("bf16") or exact ("f32"). Who merges and adds them need not know.

Shape letters: B rows (blocks), N values per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt16

from fragments.layout import FragmentLayout
from fragments.memory import is_in_memory, on_device, subtract
from fragments.payload import (
    BF16_CODEC,
    F32_CODEC,
    INT8_CODEC,
    Payload,
    decode_bf16,
    decode_f32,
    decode_int8,
    encode_bf16,
    encode_f32,
    encode_int8,
    max_wire_bytes,
)
from fragments.quantize import Quantized, Symbols, nearest_bfloat16_bits, quantize
from fragments.quantize_loop import quantize_in_memory
from fragments.runspec import CodecKind, CodecSettings

_CODEC_OF = {"int8": INT8_CODEC, "absmax": INT8_CODEC, "bf16": BF16_CODEC, "f32": F32_CODEC}
_ONE_BITS = 0x3F80
"""The bfloat16 1."""


@dataclass(frozen=True, slots=True)
class Codec:
    """One run's codec, both ways; equal ones are the same to a compiler's cache."""

    kind: CodecKind
    zstd_level: int

    @staticmethod
    def of(settings: CodecSettings) -> Codec:
        """That of a run's settings."""
        return Codec(settings.kind, settings.zstd_level)

    @property
    def id(self) -> str:
        """Codec id of the payloads."""
        return _CODEC_OF[self.kind]

    def reduce(
        self,
        x_BxN: Float32[Array, "B N"],
        valid_B: Int32[Array, " B"],
        step_fraction: Float[Array, ""] | float,
    ) -> Quantized:
        """A difference as symbols and steps; arguments as `quantize`. On a device compiled once
        for equal codecs; may be called under jit.
        """
        is_traced = isinstance(x_BxN, jax.core.Tracer)
        if self.id == INT8_CODEC and not is_traced and is_in_memory(x_BxN):
            fraction = float(step_fraction) if self.kind == "int8" else 0.0
            codes_BxN, step_bits_B, is_finite = quantize_in_memory(
                np.asarray(x_BxN), np.asarray(valid_B), fraction
            )
            return Quantized(on_device(codes_BxN), jnp.asarray(step_bits_B), jnp.asarray(is_finite))
        quantized: Quantized = _reduce(self, x_BxN, valid_B, step_fraction)
        return quantized

    def difference(
        self,
        one_BxN: Float32[Array, "B N"],
        two_BxN: Float32[Array, "B N"],
        valid_B: Int32[Array, " B"],
        step_fraction: float,
        room_BxN: Float32[np.ndarray, "B N"],
    ) -> Quantized:
        """one - two, reduced. The difference is made in `room_BxN`, where both are in memory."""
        if not (is_in_memory(one_BxN) and is_in_memory(two_BxN)):
            return self.reduce(one_BxN - two_BxN, valid_B, step_fraction)
        one, two = np.asarray(one_BxN).reshape(-1), np.asarray(two_BxN).reshape(-1)
        subtract(one, two, room_BxN.reshape(-1))
        return self.reduce(on_device(room_BxN), valid_B, step_fraction)

    def encode(
        self, fragment: FragmentLayout, symbols: Symbols, step_bits: UInt16[Array, " B"]
    ) -> Payload:
        """What `reduce` made, as bytes. Waits for the device.

        Raises PayloadError for arrays that do not fit the layout, NonFiniteError for values.
        """
        symbols_BxN = np.asarray(symbols)
        if self.id == INT8_CODEC:
            return encode_int8(fragment, symbols_BxN, np.asarray(step_bits), self.zstd_level)
        encode = encode_bf16 if self.id == BF16_CODEC else encode_f32
        return encode(fragment, symbols_BxN, self.zstd_level)

    def decode(
        self, fragment: FragmentLayout, rows_padded: int, payload: Payload
    ) -> tuple[np.ndarray, UInt16[np.ndarray, " B"]]:
        """Symbols (rows_padded, block), int8 or float32, and step bits; padding is 0.

        Raises PayloadError for what `encode` would not have made of this fragment.
        """
        if self.id == INT8_CODEC:
            return decode_int8(fragment, rows_padded, payload)
        decode = decode_bf16 if self.id == BF16_CODEC else decode_f32
        steps_B = np.zeros(rows_padded, np.uint16)
        steps_B[: fragment.num_rows] = _ONE_BITS
        return decode(fragment, rows_padded, payload), steps_B

    def nothing(self, fragment: FragmentLayout, rows_padded: int) -> Payload:
        """A difference of zero."""
        dtype = jnp.int8 if self.id == INT8_CODEC else jnp.float32
        zeros_BxN = jnp.zeros((rows_padded, fragment.block), dtype)
        return self.encode(fragment, zeros_BxN, jnp.zeros(rows_padded, jnp.uint16))

    def max_wire_bytes(self, fragment: FragmentLayout) -> int:
        """The most bytes that a payload of this fragment may have."""
        return max_wire_bytes(self.id, fragment)


@partial(jax.jit, static_argnums=0)
def _reduce(
    codec: Codec,
    x_BxN: Float32[Array, "B N"],
    valid_B: Int32[Array, " B"],
    step_fraction: Float[Array, ""] | float,
) -> Quantized:
    match codec.kind:
        case "int8" | "absmax":
            fraction = step_fraction if codec.kind == "int8" else 0.0
            quantized: Quantized = quantize(x_BxN, valid_B, fraction)
            return quantized
        case "bf16":
            return _plain(_round_to_bfloat16(x_BxN), valid_B)
        case "f32":
            return _plain(x_BxN, valid_B)


def _plain(x_BxN: Float32[Array, "B N"], valid_B: Int32[Array, " B"]) -> Quantized:
    """Values as their own symbols, at a step of 1 (and of 0 in rows of padding)."""
    steps_B = jnp.where(valid_B > 0, jnp.uint16(_ONE_BITS), jnp.uint16(0))
    return Quantized(x_BxN, steps_B, jnp.all(jnp.isfinite(x_BxN)))


def _round_to_bfloat16(x_BxN: Float32[Array, "B N"]) -> Float32[Array, "B N"]:
    magnitude_BxN = nearest_bfloat16_bits(jnp.abs(x_BxN)).astype(jnp.uint32) << jnp.uint32(16)
    sign_BxN = jax.lax.bitcast_convert_type(x_BxN, jnp.uint32) & jnp.uint32(1 << 31)
    return jax.lax.bitcast_convert_type(magnitude_BxN | sign_BxN, jnp.float32)
