"""The reference's casts against ml_dtypes and against plain arithmetic."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from crossrail import ref
from crossrail.ref import Scale

ALL_BF16 = np.arange(1 << 16, dtype=np.uint16)
ALL_E4M3 = np.arange(1 << 8, dtype=np.uint8)


def fp32_samples() -> np.ndarray:
    """Every bf16 value, the middles between them and their fp32 neighbours, as fp32."""
    middles = (ALL_BF16.astype(np.uint32) << 16)[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return middles.reshape(-1).view(np.float32)


def test_bf16_is_what_ml_dtypes_says() -> None:
    np.testing.assert_array_equal(
        ref.bf16_values(ALL_BF16), ALL_BF16.view(ml_dtypes.bfloat16).astype(np.float32), strict=True
    )
    values = fp32_samples()
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = values.astype(ml_dtypes.bfloat16)
    ours = ref.bf16_bits(values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(ours[~nan], theirs.view(np.uint16)[~nan], strict=True)
    assert (ours[nan] == 0x7FC0).all()


def test_e4m3_is_what_ml_dtypes_says() -> None:
    np.testing.assert_array_equal(ref.e4m3_values(ALL_E4M3), ALL_E4M3.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert np.signbit(ref.e4m3_values(np.uint8([0x80]))).all()
    middles = (ref.e4m3_values(ALL_E4M3[:0x7E]).astype(np.float64) + ref.e4m3_values(ALL_E4M3[1:0x7F])) / 2
    values = middles.astype(np.float32)
    near = np.concatenate([np.nextafter(values, np.float32(0)), values, np.nextafter(values, np.float32(np.inf))])
    values = np.concatenate([fp32_samples(), near, -near])
    ours = ref.e4m3_bits(values)
    finite = np.abs(values) <= 448
    np.testing.assert_array_equal(ours[finite], values[finite].astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    beyond = np.abs(values) > 448
    np.testing.assert_array_equal(ours[beyond], np.where(values[beyond] < 0, 0xFE, 0x7E))
    assert (ours[np.isnan(values)] & 0x7F == 0x7F).all()


def slow_block(block: np.ndarray, scale: Scale) -> tuple[np.ndarray, float]:
    """One block, value by value, with the values that e4m3 has in a list."""
    amax = max(float(np.max(np.abs(block))), float(np.float32(1e-4)))
    if scale == "f32":
        factor, back = np.float32(448) / np.float32(amax), np.float32(amax) * np.float32(1 / 448)
    else:
        back = np.float32(2.0 ** np.ceil(np.log2(amax / 448)))
        factor = 1 / back
    grid = ref.e4m3_values(ALL_E4M3[:0x7F]).astype(np.float64)
    codes = []
    for value in block.astype(np.float32) * factor:
        distance = np.abs(grid - abs(float(value)))
        nearest = np.flatnonzero(distance == distance.min())
        code = nearest[0] if len(nearest) == 1 else next(one for one in nearest if one % 2 == 0)
        codes.append(code | (0x80 if np.signbit(value) else 0))
    return np.uint8(codes), float(back)


@pytest.mark.parametrize("scale", ref.SCALES)
def test_blocks_against_value_by_value(scale: Scale) -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((24, 256)) * np.exp2(rng.integers(-40, 40, (24, 2))).repeat(128, axis=1)
    rows[0] = 0
    rows[1] = 1e-6
    rows[2, :128] = 448
    rows[2, 128:] = np.exp2(np.arange(128) % 16 - 8)
    x = ref.bf16_bits(rows)
    q, scales = ref.cast_rows(x, scale)
    assert q.shape == x.shape and scales.shape == (24, 2)
    assert scales.dtype == (np.uint8 if scale == "ue8m0" else np.float32)
    wide = np.exp2(scales.astype(np.float64) - 127) if scale == "ue8m0" else scales
    for row in range(len(x)):
        for block in range(2):
            part = slice(block * 128, block * 128 + 128)
            codes, back = slow_block(ref.bf16_values(x[row, part]), scale)
            np.testing.assert_array_equal(q[row, part], codes)
            assert wide[row, block] == back


@pytest.mark.parametrize("scale", ref.SCALES)
def test_blocks_with_what_is_no_number(scale: Scale) -> None:
    values = np.tile(np.linspace(-3, 3, 128), (3, 1))
    plain, _ = ref.cast_rows(ref.bf16_bits(values), scale)
    values[1, 5], values[1, 6] = np.nan, -np.nan
    values[2, 7], values[2, 8] = np.inf, -np.inf
    x = ref.bf16_bits(values)
    x[1, 6] |= 0x8000
    q, scales = ref.cast_rows(x, scale)
    assert q[1, 5:7].tolist() == [0x7F, 0xFF], "NaN with its sign"
    np.testing.assert_array_equal(np.delete(q[1], [5, 6]), np.delete(plain[1], [5, 6]))
    assert scales[1, 0] == scales[0, 0], "NaN does not count"
    assert q[2, 7:9].tolist() == [0x7E, 0xFE] and not (np.delete(q[2], [7, 8]) & 0x7F).any()
    _, largest = ref.cast_rows(np.full((1, 128), 0x7F7F, np.uint16), scale)
    assert scales[2, 0] == largest[0, 0], "infinity as the largest finite"


def test_power_of_two_scales_are_tight() -> None:
    rows = np.zeros((0x7F80, 128))  # every finite magnitude
    rows[:, 7] = ref.bf16_values(ALL_BF16[:0x7F80])
    amax = np.maximum(rows[:, 7], np.float64(np.float32(1e-4)))
    for scale in ("power2", "ue8m0"):
        _, scales = ref.cast_rows(ref.bf16_bits(rows), scale)  # type: ignore[arg-type]
        wide = (np.exp2(scales.astype(np.float64) - 127) if scale == "ue8m0" else scales.astype(np.float64))[:, 0]
        assert (wide * 448 >= amax * (1 - 2.0**-24)).all() and (wide * 224 < amax).all()


@pytest.mark.parametrize("scale", ref.SCALES)
def test_there_and_back(scale: Scale) -> None:
    rng = np.random.default_rng(6)
    x = ref.bf16_bits(rng.standard_normal((64, 512)) * 3)
    back = ref.bf16_values(ref.uncast_rows(*ref.cast_rows(x, scale)))
    values = ref.bf16_values(x)
    largest = np.abs(values).reshape(64, -1, 128).max(axis=2).repeat(128, axis=1)
    # Three mantissa bits: half a step is 2^-4 of the value; below the normal range, half of 2^-9 of the scale, which
    # is at most largest / 224. bf16 and the scale add a little.
    assert (np.abs(back - values) <= np.maximum(np.abs(values) * 0.0665, largest / 224 * 2.0**-10 * 1.01)).all()


def test_bits_takes_names_and_bits_only() -> None:
    x = np.ones(4, ml_dtypes.bfloat16)
    assert (ref.bits(x) == 0x3F80).all() and ref.bits(x).dtype == np.uint16
    assert (ref.bits(np.ones(4, ml_dtypes.float8_e4m3fn)) == 0x38).all()
    assert ref.bits(ref.bits(x)) is not None
    for other in (np.float16, np.float32, np.int16):
        with pytest.raises(TypeError):
            ref.bits(np.ones(4, other))


def test_blocks_are_whole() -> None:
    with pytest.raises(ValueError, match="200"):
        ref.cast_rows(np.zeros((2, 200), np.uint16))
