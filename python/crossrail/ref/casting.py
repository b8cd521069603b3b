"""Casts of rows to fp8: e4m3 in blocks of 128 along the last axis, with one scale per block.

All arithmetic is fp32 and each operation is rounded once, so that the result is defined bit for bit. For each block:

    amax  = the largest |x| that is not NaN, infinities taken as the largest finite bf16; at least 1e-4
    f32:    factor = 448 / amax                    scale = amax * (1 / 448), where 1 / 448 is rounded to fp32 first
    power2: factor = 2^-n                          scale = 2^n, where n is the least with 2^n >= amax * (1 / 448)
    ue8m0:  as power2                              scale is one byte, n + 127
    q     = x * factor, rounded to e4m3 to nearest, ties to even, saturated at +-448; NaN stays NaN
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from crossrail.ref.floats import E4M3_MAX, F32, U8, U16, bf16_bits, bf16_values, e4m3_bits, e4m3_values

BLOCK = 128
Scale = Literal["f32", "power2", "ue8m0"]
SCALES: tuple[Scale, ...] = ("f32", "power2", "ue8m0")

_LEAST = np.float32(1e-4)
_MOST = bf16_values(np.array([0x7F7F], np.uint16))[0]
_INVERSE = np.float32(1) / np.float32(E4M3_MAX)


def cast_rows(x: U16, scale: Scale = "f32") -> tuple[U8, npt.NDArray[np.float32] | U8]:
    """Casts bf16 bits [..., H] (H a multiple of 128) to e4m3 bits [..., H] and scales [..., H / 128] (f32, or u8)."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"{x.shape[-1]} elements are not a multiple of {BLOCK}")
    blocks = _blocks(bf16_values(x))
    amax = np.clip(np.fmax.reduce(np.abs(blocks), axis=-1, initial=0), _LEAST, _MOST)
    scales: npt.NDArray[np.float32] | U8
    if scale == "f32":
        factor, scales = np.float32(E4M3_MAX) / amax, amax * _INVERSE
    else:
        exponent = _exponent_above(amax * _INVERSE)
        factor = np.ldexp(np.float32(1), -exponent)
        scales = np.ldexp(np.float32(1), exponent) if scale == "power2" else (exponent + 127).astype(np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        q = e4m3_bits(blocks * factor[..., None])
    return q.reshape(x.shape), scales


def uncast_rows(q: U8, scales: npt.NDArray[np.float32] | U8) -> U16:
    """The inverse of `cast_rows`: bf16 bits [..., H], value times scale in fp32, rounded to bf16."""
    wide = scales if scales.dtype == np.float32 else np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return bf16_bits(_blocks(e4m3_values(q)) * wide[..., None]).reshape(q.shape)


def _blocks(values: F32) -> F32:
    return values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)


def _exponent_above(values: F32) -> npt.NDArray[np.int32]:
    """The least n with 2^n >= value, of positive normal fp32 values."""
    wide = values.view(np.uint32)
    exponents: npt.NDArray[np.int32] = (wide >> 23).astype(np.int32) - 127 + ((wide & 0x7F_FFFF) != 0)
    return exponents
