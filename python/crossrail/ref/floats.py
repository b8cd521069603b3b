"""Conversions between fp32 values and the bits of bf16 and e4m3.

bf16 is the upper half of an fp32: 1 sign, 8 exponent and 7 mantissa bits. e4m3 (the "fn" kind: finite, NaN) has 1, 4
and 3 bits and bias 7: normal from 2^-6, steps of 2^-9 below it, largest 448 (0x7e), NaN 0x7f, no infinity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]

E4M3_MAX = 448.0


def bits(array: npt.NDArray[Any]) -> Any:
    """The bits of a bf16 or e4m3 array (uint16, uint8); an array of such bits is returned unchanged."""
    name = array.dtype.name
    if name in ("bfloat16", "uint16"):
        return array.view(np.uint16)
    if name in ("float8_e4m3fn", "uint8"):
        return array.view(np.uint8)
    raise TypeError(f"{name} is neither bfloat16 nor float8_e4m3fn, nor their bits")


def bf16_values(array: U16) -> F32:
    """fp32 values of bf16 bits, exact."""
    return (array.astype(np.uint32) << 16).view(np.float32)


def bf16_bits(values: npt.ArrayLike) -> U16:
    """bf16 bits of fp32 values: nearest, ties to even; overflow becomes infinite; NaN becomes 0x7fc0."""
    wide = np.ascontiguousarray(values, np.float32).view(np.uint32)
    last = (wide >> 16) & 1  # the last bit that is kept: ties round up if it is odd
    rounded = (wide + 0x7FFF + last) >> 16
    nan = (wide & 0x7FFF_FFFF) > 0x7F80_0000
    return np.where(nan, 0x7FC0, rounded).astype(np.uint16)


def e4m3_values(array: U8) -> F32:
    """fp32 values of e4m3 bits, exact."""
    magnitude = array.astype(np.int32) & 0x7F
    exponent, mantissa = magnitude >> 3, magnitude & 7
    normal = np.ldexp(np.float32(8) + mantissa.astype(np.float32), exponent - 10)
    small = np.ldexp(mantissa.astype(np.float32), -9)
    values = np.where(exponent == 0, small, normal)
    values = np.where(magnitude == 0x7F, np.float32(np.nan), values)
    return np.where(array & 0x80, -values, values).astype(np.float32)


def e4m3_bits(values: npt.ArrayLike) -> U8:
    """e4m3 bits of fp32 values: nearest, ties to even; overflow and infinity become 448; NaN becomes 0x7f.

    The sign is preserved, also of zero and NaN.
    """
    wide = np.ascontiguousarray(values, np.float32)
    sign = (wide.view(np.uint32) >> 31 << 7).astype(np.uint8)
    nan = np.isnan(wide)
    magnitude = np.where(nan, np.float32(0), np.minimum(np.abs(wide), np.float32(E4M3_MAX)))
    exponent = np.maximum((magnitude.view(np.uint32) >> 23).astype(np.int32) - 127, -6)
    # Each octave has eight steps; division by a power of two is exact, and rint rounds ties to even.
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int32)
    code = (exponent + 6) * 8 + steps  # step sixteen is the first step of the next octave
    return np.where(nan, 0x7F, code).astype(np.uint8) | sign
