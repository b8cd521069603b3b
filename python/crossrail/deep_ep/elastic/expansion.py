"""The expanded layout: received rows once for each of their experts, grouped by expert. Tensors, made on the GPU."""

from __future__ import annotations

from crossrail.deep_ep.checks import Tensor, torch

__all__ = ["Expansion", "aligned", "all_aligned", "column_major", "expanded_ends", "fold"]

FOLDED_ROWS = 4096
"""Rows whose fp32 sums exist at once."""
COLUMN_UNIT = 4
"""Scales of 4 bytes in the 16 bytes that a column's length is a multiple of, for TMA."""


def aligned(count: int, alignment: int) -> int:
    """`count` rounded up."""
    return -(-count // alignment) * alignment


def all_aligned(counts: list[int], alignment: int) -> list[int]:
    """Each of `counts` rounded up."""
    return list(counts) if alignment == 1 else [aligned(count, alignment) for count in counts]


def expanded_ends(counts: Tensor, alignment: int) -> Tensor:
    """Where the rows of each local expert end, i32 [El]: those before it rounded up, and its own `counts`."""
    padded = (counts + (alignment - 1)) // alignment * alignment
    return (padded.cumsum(0) - padded + counts).to(torch().int32)


class Expansion:
    """Where each received row is among `size` expanded ones.

    `slots` i32 [N, K]: the place of a row for its k-th expert, -1 where that is not here. `rows` i64 [size]: the row
    of each place, any one in the padding; `filled` bool [size]: which places are not padding.
    """

    def __init__(self, topk_idx: Tensor, counts: Tensor, alignment: int, size: int) -> None:
        """`topk_idx` i64 [N, K]: local experts, -1 for none; `counts` i32 [El]: how often each is chosen."""
        t, (received, topk), experts = torch(), topk_idx.shape, counts.shape[0]
        device, chosen = topk_idx.device, topk_idx.reshape(-1)
        group, order = t.sort(t.where(chosen >= 0, chosen, experts), stable=True)
        # Offset from a row's index without padding to its index with padding; rows without an expert go to the end.
        shift = expanded_ends(counts, alignment).to(t.int64) - counts.cumsum(0)
        shift = t.cat([shift, shift.new_zeros((1,))])
        numbers = t.arange(received * topk, device=device)
        sorted_places = t.where(group < experts, numbers + shift[group], size)
        self._places = t.empty_like(chosen).scatter_(0, order, sorted_places)
        self.slots = t.where(self._places < size, self._places, -1).to(t.int32).view(received, topk)
        self.rows = self._scattered(numbers // topk, size)
        self.filled = self._scattered(t.ones_like(numbers), size) > 0

    def _scattered(self, values: Tensor, size: int) -> Tensor:
        """[size] of one value for each row and k, 0 in the padding."""
        return values.new_zeros((size + 1,)).scatter_(0, self._places, values)[:size]

    def weights(self, topk_weights: Tensor) -> Tensor:
        """f32 [size]: weights [N, K] at their places, 0 in the padding."""
        return self._scattered(topk_weights.reshape(-1), len(self.rows))

    def gather(self, rows: Tensor, zero_padding: bool) -> Tensor:
        """`rows` [N, ...] at their places, in memory of their own."""
        wide = rows.view(torch().int64) if rows.element_size() < 4 else rows
        placed = wide.index_select(0, self.rows)
        if zero_padding:
            placed.masked_fill_(~self.filled.view(-1, 1), 0)
        return placed.view(rows.dtype)


def fold(rows: Tensor, slots: Tensor) -> Tensor:
    """bf16 [N, H]: for each received row the sum of its expanded `rows` bf16 [S, H], in fp32 and in the order of k."""
    t = torch()
    sums = rows.new_empty((len(slots), rows.shape[1]))
    for first in range(0, len(slots), FOLDED_ROWS):
        part = slots[first : first + FOLDED_ROWS]
        total = t.zeros((len(part), rows.shape[1]), dtype=t.float32, device=rows.device)
        for k in range(part.shape[1]):
            total += pick(rows, part[:, k])
        sums[first : first + FOLDED_ROWS] = total.to(rows.dtype)
    return sums


def pick(rows: Tensor, places: Tensor) -> Tensor:
    """`rows` [S, ...] at `places` [N], zeros where that is -1."""
    picked = rows.index_select(0, places.clamp(min=0))
    return picked.masked_fill_((places < 0).view(-1, *(1 for _ in rows.shape[1:])), 0)


def column_major(scales: Tensor) -> Tensor:
    """Scales [N, S] in columns whose lengths are multiples of 16 bytes, as TMA reads them."""
    count, across = scales.shape
    columns = torch().empty((across, aligned(count, COLUMN_UNIT)), dtype=scales.dtype, device=scales.device)
    return columns.t()[:count].copy_(scales)
