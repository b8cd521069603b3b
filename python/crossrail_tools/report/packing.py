"""The compact JSON of reports: one line per row, times rounded to the nanosecond, long lists of samples packed.

A packed list is the string ``ns:`` and base85 (`base64.b85encode`) of zlib of the times in nanoseconds: 64-bit signed
integers, little-endian, all first bytes of the integers, then all second bytes, and so on.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "ns:"
DECIMALS = 3
"""Of a microsecond: times are read from clocks of nanoseconds."""
PACKED_FROM = 16
"""Shorter lists stay as they are: packing would gain nothing."""
DIGITS = 6
"""Significant digits of rates and shares in a packed file."""
MOST_UNPACKED = 64 << 20
"""Bytes of the longest list that is unpacked: a short string can hold any number of them."""
_WIDTH = 8
_TIME = "_us"


def compact(data: Mapping[str, Any], *, pack: bool = False) -> str:
    """``data`` as JSON text that ends in a newline: one line per item of a list of objects, one per other field.

    Numbers in fields whose names end in ``_us`` are rounded to the nanosecond. With ``pack`` their lists of 16 and
    more are packed, and other fractions keep six significant digits. Raises ValueError for a number that is not finite.
    """
    return _object(_rounded(data, "", pack), 0) + "\n"


def packed(times_us: Sequence[float]) -> str:
    """A list of microseconds as a string, rounded to nanoseconds."""
    whole = struct.pack(f"<{len(times_us)}q", *(round(time * 1e3) for time in times_us))
    planes = b"".join(whole[place::_WIDTH] for place in range(_WIDTH))
    return PREFIX + base64.b85encode(zlib.compress(planes, 9)).decode()


def unpacked(text: str) -> list[float]:
    """The list that :func:`packed` made a string of. Raises ValueError for any other string."""
    if not text.startswith(PREFIX):
        raise ValueError(f"packed times begin with {PREFIX!r}, not {text[: len(PREFIX)]!r}")
    try:
        inflate = zlib.decompressobj()
        planes = inflate.decompress(base64.b85decode(text.removeprefix(PREFIX)), MOST_UNPACKED + 1)
        if len(planes) > MOST_UNPACKED or not inflate.eof:
            raise ValueError("too many, or cut short")
    except (ValueError, zlib.error) as error:
        raise ValueError(f"packed times do not unpack: {error}") from error
    count, rest = divmod(len(planes), _WIDTH)
    if rest:
        raise ValueError(f"packed times have {len(planes)} bytes, not a multiple of {_WIDTH}")
    whole = bytearray(len(planes))
    for place in range(_WIDTH):
        whole[place::_WIDTH] = planes[place * count : (place + 1) * count]
    return [time / 1e3 for time in struct.unpack(f"<{count}q", whole)]


def with_lists(data: Any) -> Any:
    """Parsed JSON with every packed string turned back into a list."""
    if isinstance(data, dict):
        return {
            name: unpacked(value)
            if name.endswith(_TIME) and isinstance(value, str) and value.startswith(PREFIX)
            else with_lists(value)
            for name, value in data.items()
        }
    if isinstance(data, list):
        return [with_lists(value) for value in data]
    return data


def _rounded(value: Any, name: str, pack: bool) -> Any:
    if isinstance(value, Mapping):
        # Parts of a time are named in an object, as in stages_us: {"cast": 1.0}.
        inside = name if name.endswith(_TIME) else ""
        return {key: _rounded(inner, inside or key, pack) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        if pack and name.endswith(_TIME) and len(value) >= PACKED_FROM and _all_times(value):
            return packed(value)
        return [_rounded(inner, name, pack) for inner in value]
    if not isinstance(value, float):
        return value
    if name.endswith(_TIME):
        return round(value, DECIMALS)
    return float(f"{value:.{DIGITS}g}") if pack else value


def _all_times(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _object(data: Mapping[str, Any], depth: int) -> str:
    indent = " " * (depth + 1)
    fields = [f"{indent}{_line(name)}:{_field(value, depth + 1)}" for name, value in data.items()]
    return "{\n" + ",\n".join(fields) + "\n" + " " * depth + "}" if fields else "{}"


def _field(value: Any, depth: int) -> str:
    if isinstance(value, Mapping) and any(_objects(inner) for inner in value.values()):
        return _object(value, depth)
    if not _objects(value):
        return _line(value)
    indent = " " * (depth + 1)
    return "[\n" + ",\n".join(indent + _line(item) for item in value) + "\n" + " " * depth + "]"


def _objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
