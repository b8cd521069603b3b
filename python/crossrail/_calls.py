"""Checks of the arguments of an ExpertBuffer, with errors that name them, before the native module is called."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from crossrail._arrays import BF16, BF16_BITS, F32, FP8, I32, I64, U8, Array, checked, raw, wrong
from crossrail._native import Handle
from crossrail.errors import CrossrailError
from crossrail.records import BufferParameters

from ._words import kind

BLOCK = 128
"""Elements of a row that share one fp8 scale."""
LARGEST = 2**32 - 1


@dataclass(frozen=True)
class Sizes:
    """The sizes of a buffer that determine the shapes of arrays."""

    ranks: int
    max_tokens: int
    hidden: int
    experts: int
    topk: int
    fp8: bool
    ue8m0: bool

    @staticmethod
    def of(parameters: BufferParameters) -> Sizes:
        return Sizes(
            ranks=parameters["ranks"],
            max_tokens=parameters["max_tokens"],
            hidden=parameters["hidden"],
            experts=parameters["experts"],
            topk=parameters["topk"],
            fp8=parameters["dispatch_dtype"] == "fp8",
            ue8m0=parameters["scale"] == "ue8m0",
        )

    @property
    def local(self) -> int:
        """Number of experts per rank (El)."""
        return self.experts // self.ranks

    @property
    def most(self) -> int:
        """Maximum number of rows of an expert, and of a rank: ranks*M."""
        return self.ranks * self.max_tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = FP8 if self.fp8 else BF16
        return dtype

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        return U8 if self.ue8m0 else F32

    def rows(self, layout: str, count: int) -> tuple[int, ...]:
        """The shape of the rows that a dispatch delivers; in the rank layout there are ``count``."""
        return (self.local, self.most, self.hidden) if layout == "expert" else (count, self.hidden)

    def scales(self, layout: str, count: int) -> tuple[int, ...]:
        """The shape of their scales."""
        return (*self.rows(layout, count)[:-1], self.hidden // BLOCK)


class DispatchCall(NamedTuple):
    """The arguments of `ExpertBuffer.dispatch`.

    ``host_word``, for the rank layout on a GPU, is a number below 2^32 - 1 that the other ranks' hosts receive as
    `DeviceDispatched.host_words` when they wait for the number of rows.
    """

    x: Any
    topk_idx: Any
    topk_weights: Any
    layout: Literal["expert", "rank"]
    handle: Any
    expert_alignment: int
    out: Any
    stats: Any
    waits: Any
    max_rows: int | None
    stream: Any
    send_only: bool
    host_word: int = 0


class CombineCall(NamedTuple):
    """The arguments of `ExpertBuffer.combine`."""

    y: Any
    handle: Any
    topk_weights: Any
    bias: Any
    out: Any
    waits: Any
    stream: Any
    send_only: bool
    wire: Any = "bf16"


def number(name: str, value: Any, operation: str = "ExpertBuffer") -> int:
    """``value`` as an integer from 0 to `LARGEST`. Raises UsageError."""
    try:
        integer = operator.index(value)
    except TypeError:
        raise wrong(operation, f"{name} is {kind(value)}, not an integer") from None
    if not 0 <= integer <= LARGEST:
        raise wrong(operation, f"{name} {integer} is not from 0 to {LARGEST}")
    return integer


def seconds(value: Any) -> float:
    """``value`` as a timeout in seconds. Raises UsageError."""
    if not isinstance(value, int | float) or not value >= 0:
        raise wrong("ExpertBuffer", f"timeout {value!r} is not a number of seconds")
    return float(value)


def rank_list(ranks: Iterable[int], operation: str) -> list[int]:
    if not isinstance(ranks, Iterable):
        raise wrong(operation, f"ranks is {kind(ranks)}, not a list of integers")
    return [number("rank", rank, operation) for rank in ranks]


def parameters_of(
    numbers: Mapping[str, Any], dispatch_dtype: str, scale: str, layouts: Sequence[str], timeout: float
) -> BufferParameters:
    """The parameters of a native buffer, which has shorter names for the sizes."""
    given = {name: number(name, value) for name, value in numbers.items()}
    return {
        "ranks": given["ranks"],
        "max_tokens": given["max_tokens_per_rank"],
        "hidden": given["hidden"],
        "experts": given["num_experts"],
        "topk": given["topk"],
        "dispatch_dtype": str(dispatch_dtype),
        "scale": str(scale),
        "layouts": [layouts] if isinstance(layouts, str) else [str(layout) for layout in layouts],
        "prereduce": True,
        "share_node": True,
        "timeout": timeout,
        "on_loss": "raise",
    }


def check_layout(layout: Any) -> None:
    if layout not in ("expert", "rank"):
        raise wrong("dispatch", f"layout {layout!r} is neither 'expert' nor 'rank'")


def inputs(sizes: Sizes, x: Any, topk_idx: Any, topk_weights: Any, handle: Any) -> tuple[Array, Array, Array | None]:
    """The bytes of the rows, experts and weights of a dispatch."""
    if handle is not None:
        if not isinstance(handle, Handle):
            raise wrong("dispatch", f"handle is {kind(handle)}, not the handle of a dispatch")
        rows = checked(x, "x", "dispatch", BF16_BITS, (handle.tokens, sizes.hidden))
        return raw(rows), np.empty(0, np.uint8), None
    if topk_idx is None:
        raise wrong("dispatch", "topk_idx is None", "it may be left out when a handle is given")
    rows = checked(x, "x", "dispatch", BF16_BITS, ("T", sizes.hidden))
    experts = checked(_together(topk_idx), "topk_idx", "dispatch", (I64,), (len(rows), sizes.topk))
    return raw(rows), raw(experts), _weights(topk_weights, len(rows), sizes.topk, "dispatch")


def outputs(
    sizes: Sizes, y: Any, handle: Handle, topk_weights: Any, bias: Any, out: Any
) -> tuple[Array, Handle, Array | None, list[Array], Array | None]:
    """The bytes of the rows, weights, biases and result of a combine."""
    if not isinstance(handle, Handle):
        raise wrong("combine", f"handle is {kind(handle)}, not the handle of a dispatch")
    rows = checked(y, "y", "combine", BF16_BITS, sizes.rows(handle.layout, handle.rows))
    weights = _weights(topk_weights, handle.tokens, sizes.topk, "combine")
    shape = (handle.tokens, sizes.hidden)
    biases = [raw(checked(one, "bias", "combine", BF16_BITS, shape)) for one in biases_of(bias)]
    result = None if out is None else raw(checked(out, "out", "combine", BF16_BITS, shape, writable=True))
    return raw(rows), handle, weights, biases, result


def biases_of(bias: Any) -> list[Any]:
    """The biases of a combine: none, one, or a list of up to two. Raises UsageError."""
    several = list(bias) if isinstance(bias, list | tuple) else [] if bias is None else [bias]
    if len(several) > 2:
        raise wrong("combine", f"{len(several)} biases where there may be two")
    return several


def _weights(value: Any, tokens: int, topk: int, operation: str) -> Array | None:
    if value is None:
        return None
    return raw(checked(_together(value), "topk_weights", operation, (F32,), (tokens, topk)))


def _together(value: Any) -> Any:
    """A contiguous copy if necessary. Routers often return slices such as `order[:, :topk]`, and these are small."""
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value


def why(error: Exception) -> str:
    """The description of an error on this rank for the other ranks."""
    return error.detail if isinstance(error, CrossrailError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Target:
    """An array of the caller to copy rows into."""

    given: Any
    array: Array

    def take(self, name: str, rows: Array, counts: Array | None) -> Any:
        """Copies the valid rows: ``counts`` of each expert in the expert layout, otherwise all.

        Returns the caller's array, or the part of it that has the rows.
        """
        if counts is not None:
            for into, come, count in zip(self.array.view(U8), rows.view(U8), counts, strict=True):
                into[:count] = come[:count]
            return self.given
        if len(rows) > len(self.array):
            hint = "ranks * max_tokens_per_rank rows are always enough; the other ranks are not affected"
            raise wrong("dispatch", f"out[{name!r}] has {len(self.array)} rows, but {len(rows)} were received", hint)
        self.array[: len(rows)].view(U8)[...] = rows.view(U8)
        return self.given if len(rows) == len(self.array) else self.array[: len(rows)]


@dataclass(frozen=True)
class Destinations:
    """The caller's arrays that receive a copy of the results of a dispatch."""

    x: Target | None
    scales: Target | None
    stats: Array | None

    @staticmethod
    def of(sizes: Sizes, layout: Literal["expert", "rank"], out: Any, stats: Any) -> Destinations:
        """Checks the arguments ``out`` and ``stats``. Raises UsageError."""
        check_layout(layout)
        given = {} if out is None else dict(out)
        kinds = {"x": (sizes.dtype, sizes.rows(layout, 0)[-1])}
        if sizes.fp8:
            kinds["scales"] = (sizes.scale_dtype, sizes.scales(layout, 0)[-1])
        if unknown := given.keys() - kinds.keys():
            raise wrong("dispatch", f"out has unknown keys {sorted(map(str, unknown))}; known: {list(kinds)}")
        targets: dict[str, Target] = {}
        for name, (dtype, width) in kinds.items():
            if name in given:
                shape = (sizes.local, sizes.most, width) if layout == "expert" else ("N", width)
                bits = np.dtype(f"u{dtype.itemsize}")
                array = checked(given[name], f"out[{name!r}]", "dispatch", (dtype, bits), shape, writable=True)
                targets[name] = Target(given[name], array)
        counted = None
        if stats is not None:
            counted = checked(stats, "stats", "dispatch", (I32, I64), (sizes.local,), writable=True)
        return Destinations(targets.get("x"), targets.get("scales"), counted)
