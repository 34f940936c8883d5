"""Payloads: exact both ways, and nothing but PayloadError for anything else."""

from __future__ import annotations

from dataclasses import replace

import google_crc32c
import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jaxtyping import TypeCheckError

from fragments.errors import NonFiniteError, PayloadError
from fragments.layout import FragmentLayout, TensorSpec, build_layout
from fragments.payload import (
    F32_CODEC,
    INT8_CODEC,
    MAX_STEP_BITS,
    MIN_STEP_BITS,
    Payload,
    decode_f32,
    decode_int8,
    encode_f32,
    encode_int8,
    max_raw_size,
    max_wire_bytes,
)

BLOCK = 8
LAYOUT = build_layout(
    [
        TensorSpec("a", (20,), "float32"),
        TensorSpec("b", (0,), "float32"),
        TensorSpec("c", (), "float32"),
        TensorSpec("d", (40,), "float32"),
        TensorSpec("e", (16,), "float32"),
    ],
    2,
    BLOCK,
    "payload",
)
ROWS = LAYOUT.rows_padded
P0, P1 = LAYOUT.fragments
HEADER_BYTES = 20
REFUSED = (PayloadError, TypeCheckError)
"""Shape annotations are checked while tests run, so they may speak first."""


def valid_mask(fragment: FragmentLayout) -> np.ndarray:
    mask = np.zeros(ROWS * BLOCK, bool)
    for slot in fragment.slots:
        mask[slot.row_start * BLOCK : slot.row_start * BLOCK + slot.size] = True
    return mask.reshape(ROWS, BLOCK)


@st.composite
def quantized(draw: st.DrawFn) -> tuple[FragmentLayout, np.ndarray, np.ndarray]:
    fragment = draw(st.sampled_from(LAYOUT.fragments))
    codes = draw(hnp.arrays(np.int8, (ROWS, BLOCK), elements=st.integers(-127, 127)))
    a_step = st.just(0) | st.integers(MIN_STEP_BITS, MAX_STEP_BITS)
    steps = draw(hnp.arrays(np.uint16, ROWS, elements=a_step))
    steps[fragment.num_rows :] = 0
    return fragment, np.where(valid_mask(fragment) & (steps > 0)[:, None], codes, 0), steps


def an_int8_payload() -> Payload:
    codes = np.where(valid_mask(P0), np.arange(ROWS * BLOCK).reshape(ROWS, BLOCK) - 30, 0)
    return encode_int8(P0, codes.astype(np.int8), valid_steps(P0))


def valid_steps(fragment: FragmentLayout, bits: int = MIN_STEP_BITS) -> np.ndarray:
    return np.where(np.arange(ROWS) < fragment.num_rows, bits, 0).astype(np.uint16)


def an_f32_payload() -> Payload:
    values = np.where(valid_mask(P0), np.arange(ROWS * BLOCK).reshape(ROWS, BLOCK) / 7, 0)
    return encode_f32(P0, values.astype(np.float32))


def forged(codec: str, raw: bytes) -> Payload:
    """A payload of `raw` whose checksum and sizes are all in order."""
    data = zstandard.ZstdCompressor(level=1).compress(raw)
    return Payload(codec, len(raw), google_crc32c.value(data), data)


def raw_of(payload: Payload) -> bytearray:
    return bytearray(zstandard.ZstdDecompressor().decompress(payload.data))


def with_data(payload: Payload, data: bytes) -> Payload:
    return replace(payload, data=data, crc32c=google_crc32c.value(data))


@given(quantized(), st.integers(1, 5))
def test_int8_comes_back_and_has_the_declared_size(
    case: tuple[FragmentLayout, np.ndarray, np.ndarray], level: int
) -> None:
    fragment, codes, steps = case
    payload = encode_int8(fragment, codes, steps, level)
    assert payload == encode_int8(fragment, codes, steps, level)
    assert payload.raw_size <= max_raw_size(INT8_CODEC, fragment)
    assert len(payload.data) <= max_wire_bytes(payload.codec, fragment)
    codes_back, steps_back = decode_int8(fragment, ROWS, payload)
    np.testing.assert_array_equal(codes_back, codes, strict=True)
    np.testing.assert_array_equal(steps_back, steps, strict=True)


@given(
    st.sampled_from(LAYOUT.fragments),
    hnp.arrays(np.uint32, (ROWS, BLOCK), elements=st.integers(0, 2**32 - 1)),
)
@example(P0, np.full((ROWS, BLOCK), 0x80000000, np.uint32))
@example(P0, np.full((ROWS, BLOCK), 0x00000001, np.uint32))
def test_f32_comes_back_to_the_bit(fragment: FragmentLayout, bits: np.ndarray) -> None:
    keep = valid_mask(fragment) & np.isfinite(bits.view(np.float32))
    blocks = np.where(keep, bits, 0).astype(np.uint32).view(np.float32)
    payload = encode_f32(fragment, blocks)
    assert payload.raw_size == HEADER_BYTES + 4 * fragment.num_values
    back = decode_f32(fragment, ROWS, payload)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back.view(np.uint32), blocks.view(np.uint32), strict=True)


def test_a_decoder_may_pad_to_another_number_of_rows() -> None:
    codes, steps = decode_int8(P0, P0.num_rows + 5, an_int8_payload())
    assert codes.shape == (P0.num_rows + 5, BLOCK)
    assert not codes[P0.num_rows :].any()
    assert not steps[P0.num_rows :].any()


def test_what_is_in_padding_does_not_travel() -> None:
    codes = np.ones((ROWS, BLOCK), np.int8)
    back, _ = decode_int8(P0, ROWS, encode_int8(P0, codes, valid_steps(P0)))
    np.testing.assert_array_equal(back, valid_mask(P0).astype(np.int8))


def test_the_format_is_what_the_codec_ids_have_stood_for() -> None:
    """Golden: a change of these bytes needs a new codec id."""
    specs = [TensorSpec("a", (3,), "float32"), TensorSpec("b", (), "float32")]
    fragment = build_layout(specs, 1, 2, "").fragments[0]
    codes = np.array([[1, -2], [3, 0], [127, 0]], np.int8)
    int8 = encode_int8(fragment, codes, np.array([0x3F80, 0x4000, 0x3F00], np.uint16))
    assert raw_of(int8).hex(" ", -4) == (
        # header; steps; row 2 is wide; rows 0 and 1 as nibbles (1, -2) and (3, 0); row 2
        "444c6932 02000000 03000000 04000000 00000000 803f0040 003f0101 02e1037f 00"
    )
    one = build_layout([TensorSpec("a", (16,), "float32")], 1, 16, "").fragments[0]
    escaped = np.zeros((1, 16), np.int8)
    escaped[0, :3], escaped[0, 8] = (7, -20, -7), 5
    raw = raw_of(encode_int8(one, escaped, np.array([0x3F80], np.uint16)))
    assert raw[HEADER_BYTES:].hex(" ", -4) == "803f0157 08090000 000000ec"
    trits = np.sign(escaped)
    raw = raw_of(encode_int8(one, trits, np.array([0x3F80], np.uint16)))
    assert raw[HEADER_BYTES:].hex(" ", -4) == "803f0083 787879"
    f32 = encode_f32(fragment, codes.astype(np.float32))
    assert raw_of(f32).hex(" ", -4) == (
        "444c6631 02000000 03000000 04000000 00000000 0000803f 000000c0 00004040 0000fe42"
    )
    assert int8.crc32c == google_crc32c.value(int8.data)


def test_an_empty_fragment_is_ordinary() -> None:
    empty = build_layout([TensorSpec("a", (0, 3), "float32")], 1, BLOCK, "").fragments[0]
    zeros = np.zeros((1, BLOCK), np.int8)
    payload = encode_int8(empty, zeros, np.zeros(1, np.uint16))
    assert decode_int8(empty, 1, payload)[0].tolist() == zeros.tolist()
    assert decode_f32(empty, 1, encode_f32(empty, zeros.astype(np.float32))).any() == np.False_


def test_ordinary_symbols_cost_few_bits() -> None:
    """A Gaussian at step = RMS/2 has an entropy of 3.05 bits; zstd's Huffman comes close."""
    fragment = build_layout([TensorSpec("w", (512, 512), "float32")], 1, 4096, "").fragments[0]
    noise = np.random.default_rng(0).standard_normal((64, 4096))
    codes = np.clip(np.rint(noise * 2), -127, 127).astype(np.int8)
    payload = encode_int8(fragment, codes, np.full(64, 0x3F00, np.uint16))
    assert 8 * len(payload.data) / fragment.num_values < 3.15


@pytest.mark.parametrize("bits", [1, MIN_STEP_BITS - 1, MAX_STEP_BITS + 1, 0x7F80, 0x7FC0, 0xBF80])
def test_steps_out_of_range_are_refused_on_both_sides(bits: int) -> None:
    codes = np.zeros((ROWS, BLOCK), np.int8)
    with pytest.raises(PayloadError, match="step outside"):
        encode_int8(P0, codes, valid_steps(P0, bits))
    raw = raw_of(an_int8_payload())
    raw[HEADER_BYTES : HEADER_BYTES + 2] = bits.to_bytes(2, "little")
    with pytest.raises(PayloadError, match="step outside"):
        decode_int8(P0, ROWS, forged(INT8_CODEC, bytes(raw)))


def test_symbols_that_no_quantizer_makes_are_refused_on_both_sides() -> None:
    codes = np.full((ROWS, BLOCK), -128, np.int8)
    with pytest.raises(PayloadError, match="-128"):
        encode_int8(P0, codes, valid_steps(P0))
    with pytest.raises(PayloadError, match="step is 0"):
        encode_int8(P0, codes + np.int8(1), valid_steps(P0, 0))
    raw = raw_of(an_int8_payload())
    raw[-1] = 0x80
    with pytest.raises(PayloadError, match="-128"):
        decode_int8(P0, ROWS, forged(INT8_CODEC, bytes(raw)))
    raw = raw_of(an_int8_payload())
    raw[HEADER_BYTES : HEADER_BYTES + 2] = bytes(2)
    with pytest.raises(PayloadError, match="step is 0"):
        decode_int8(P0, ROWS, forged(INT8_CODEC, bytes(raw)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_on_both_sides(value: float) -> None:
    with pytest.raises(NonFiniteError):
        encode_f32(P0, np.full((ROWS, BLOCK), value, np.float32))
    raw = raw_of(an_f32_payload())
    raw[-4:] = np.array(value, "<f4").tobytes()
    with pytest.raises(PayloadError, match="not finite"):
        decode_f32(P0, ROWS, forged(F32_CODEC, bytes(raw)))


def test_arrays_that_do_not_fit_are_not_encoded() -> None:
    codes, steps = np.zeros((ROWS, BLOCK), np.int8), valid_steps(P0)
    bad: list[tuple[np.ndarray, np.ndarray]] = [
        (codes[:1], steps[:1]),
        (codes[:, :4], steps),
        (codes.astype(np.int16), steps),
        (codes.reshape(-1), steps),
        (codes, steps[:1]),
        (codes, steps.astype(np.int32)),
    ]
    for bad_codes, bad_steps in bad:
        with pytest.raises(REFUSED):
            encode_int8(P0, bad_codes, bad_steps)
    with pytest.raises(REFUSED):
        encode_f32(P0, np.zeros((ROWS, BLOCK)))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (replace(an_int8_payload(), crc32c=0), "checksum"),
        (replace(an_int8_payload(), codec="int8-rms-zstd/1"), "codec is 'int8-rms-zstd/1'"),
        (an_f32_payload(), "codec is 'f32-zstd/1'"),
        (replace(an_int8_payload(), raw_size=1 << 60), "declares 1152921504606846976 raw bytes"),
        (with_data(an_int8_payload(), b""), "not a whole zstd frame"),
        (with_data(an_int8_payload(), an_int8_payload().data[:-1]), "not a whole zstd frame"),
        (with_data(an_int8_payload(), an_int8_payload().data + b"x"), "not a whole zstd frame"),
        (with_data(an_int8_payload(), bytes(10_000)), "too many"),
    ],
)
def test_the_sentence_says_what_is_wrong(payload: Payload, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        decode_int8(P0, ROWS, payload)


def test_a_fragment_of_the_same_size_but_another_shape_is_refused() -> None:
    """Sizes agree, tensors do not: the header tells, since rows and values are both in it."""
    one = build_layout([TensorSpec("a", (10,), "float32")], 1, 4, "").fragments[0]
    two = build_layout([TensorSpec("a", (10,), "float32")], 1, 5, "").fragments[0]
    payload = encode_f32(one, np.zeros((3, 4), np.float32))
    assert max_raw_size(F32_CODEC, one) == max_raw_size(F32_CODEC, two)
    with pytest.raises(PayloadError, match="another layout"):
        decode_f32(two, 2, payload)


@pytest.mark.parametrize("stated", [True, False])
def test_a_bomb_is_refused_before_it_is_decompressed(stated: bool) -> None:
    """64 MiB of zeros in 2 KB, whether the frame states it or not."""
    bomb = zstandard.ZstdCompressor(write_content_size=stated).compress(bytes(64 << 20))
    payload = with_data(an_int8_payload(), bomb)
    with pytest.raises(PayloadError, match=r"too many|frame states"):
        decode_int8(P0, ROWS, payload)


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    """The stated size is the expected one, the content is longer."""
    expected = an_int8_payload().raw_size
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(200)))
    at = frame.index(200)
    frame[at] = expected
    assert zstandard.get_frame_parameters(bytes(frame)).content_size == expected
    with pytest.raises(PayloadError):
        decode_int8(P0, ROWS, with_data(an_int8_payload(), bytes(frame)))


def mutated(draw: st.DrawFn, original: bytes) -> bytes:
    """Cut, flipped, overwritten, repeated, or anything at all."""
    kind = draw(st.sampled_from(["cut", "flip", "overwrite", "insert", "random"]))
    if kind == "random":
        return draw(st.binary(max_size=200))
    at = draw(st.integers(0, len(original) - 1))
    if kind == "cut":
        return original[:at]
    if kind == "flip":
        flipped = bytearray(original)
        flipped[at] ^= 1 << draw(st.integers(0, 7))
        return bytes(flipped)
    noise = draw(st.binary(min_size=1, max_size=20))
    return original[:at] + noise + original[at + (len(noise) if kind == "overwrite" else 0) :]


@st.composite
def damaged_payloads(draw: st.DrawFn) -> tuple[Payload, bool]:
    """A damaged payload, and whether its checksum was made to fit the damage."""
    original = draw(st.sampled_from([an_int8_payload(), an_f32_payload()]))
    codec = draw(st.sampled_from([original.codec, original.codec, "", "int8-rms-zstd/9"]))
    depth = draw(st.sampled_from(["wire", "frame", "raw"]))
    if depth == "raw":
        return forged(codec, mutated(draw, bytes(raw_of(original)))), True
    data = mutated(draw, original.data)
    damaged = replace(original, codec=codec, data=data)
    if depth == "frame":
        damaged = with_data(damaged, data)
    elif data == original.data and codec == original.codec:
        damaged = replace(damaged, crc32c=damaged.crc32c ^ 1)
    return damaged, depth != "wire"


@settings(max_examples=600)
@given(damaged_payloads(), st.sampled_from([P0, P1]))
def test_damage_is_a_payload_error_or_a_valid_value(
    case: tuple[Payload, bool], fragment: FragmentLayout
) -> None:
    payload, consistent = case
    for decode in (decode_int8, decode_f32):
        try:
            value = decode(fragment, ROWS, payload)
        except PayloadError:
            continue
        # Only damage under a checksum that was forged to fit it can pass, and never as nonsense.
        assert consistent
        if isinstance(value, tuple):
            assert encode_int8(fragment, *value).raw_size <= max_raw_size(INT8_CODEC, fragment)
        else:
            assert encode_f32(fragment, value).raw_size == payload.raw_size
