"""Comparison of a rank's dispatch and combine on a GPU with a sample of the reference, before a measurement.

Compared bit for bit: all counts, ranges, offsets, sources, indices and weights; a few blocks of columns of every
received row; and a sample of complete rows. Sums are compared within the bound of `summing`: a few blocks of columns of
every token, and a sample of complete tokens. The complete reference would take longer than the measurement.

The experts' outputs do not depend on the rows received: row i is row i mod `PERIOD` of some random rows. They are known
without a transfer, and a sum of wrong rows differs from the correct one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from crossrail.ref.casting import BLOCK, cast_rows
from crossrail.ref.exchange import I64, Dispatched, Handle, dispatch
from crossrail.ref.floats import U16, bf16_bits, bf16_values
from crossrail.ref.summing import combine_exact
from crossrail_tools.verify.checking import Difference, Inputs, Work, same

PERIOD = 61
"""Period of the rows of the experts' outputs; a prime, so that it does not align with rows, ranks or experts."""

BLOCKS = 3
WHOLE_ROWS = 32
WHOLE_TOKENS = 8


def outputs(work: Work, rank: int) -> U16:
    """The rows, bf16 bits [PERIOD, H], that the experts of `rank` repeat as their outputs."""
    rng = np.random.default_rng([work.seed, rank, PERIOD])
    return bf16_bits(rng.standard_normal((PERIOD, work.shape.hidden), dtype=np.float32))


def inputs(work: Work) -> list[Inputs]:
    """The inputs of each rank. Those of the last call are cached."""
    return _inputs(replace(work, layout="expert", scale=None, prereduce=True))


@lru_cache(maxsize=1)
def _inputs(work: Work) -> list[Inputs]:
    ranks = range(work.shape.ranks)
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(lambda rank: work.inputs(rank, ranks), ranks))


@dataclass(frozen=True)
class Sums:
    """Expected values of some columns of some tokens, f64 [tokens, columns], and their error bounds."""

    tokens: I64
    columns: I64
    exact: Any
    bound: Any

    def judge(self, got: U16, rank: int) -> None:
        """Compares bf16 bits. Raises Difference."""
        wrong = ~(np.abs(bf16_values(got) - self.exact) <= self.bound)
        if wrong.any():
            token, at = (int(i) for i in np.argwhere(wrong)[0])
            raise Difference(
                f"rank {rank}: combine: {int(wrong.sum())} of {wrong.size} values differ, first token "
                f"{int(self.tokens[token])}, element {int(self.columns[at])}: {float(bf16_values(got[token, at])):.6g} "
                f"for {self.exact[token, at]:.6g} +- {self.bound[token, at]:.3g}"
            )


class Judge:
    """Compares the results of `rank`; `turn` seeds the choice of samples. Expected values are cached.

    ``node``: the number of ranks in a node, if rows return once from each node."""

    def __init__(self, work: Work, rank: int, turn: int = 0, node: int = 1) -> None:
        self.work, self.rank, self.node = work, rank, node
        self.turn = turn
        rng = np.random.default_rng([work.seed, rank, turn])
        self.inputs = inputs(work)
        blocks = work.shape.hidden // BLOCK
        chosen = {0, blocks - 1, *rng.integers(0, blocks, BLOCKS).tolist()}
        self.blocks = np.array(sorted(chosen))
        self.columns: I64 = (self.blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)

    def judge_dispatch(self, parts: Mapping[str, bytes]) -> None:
        """Compares the result of `_DeviceEp.dispatch`. Raises Difference."""
        expected = self._arriving
        where = f"rank {self.rank}: dispatch"
        same(f"{where}: counts", np.frombuffer(parts["counts"], np.int32), expected.counts)
        if self.work.layout == "expert":
            self._judge_experts(parts, expected, where)
        else:
            self._judge_ranks(parts, expected, where)

    def judge_combine(self, sums: bytes) -> None:
        """Compares the result of `_DeviceEp.combine`. Raises Difference."""
        got = np.frombuffer(sums, np.uint16).reshape(self.work.tokens, self.work.shape.hidden)
        for part in self._sums:
            part.judge(got[part.tokens][:, part.columns], self.rank)

    @cached_property
    def _sums(self) -> list[Sums]:
        """Sums of some columns of every token, and of some tokens completely."""
        some = np.array(self._some(self.work.tokens, WHOLE_TOKENS), np.int64)
        parts = [(np.arange(self.work.tokens), self.columns), (some, np.arange(self.work.shape.hidden))]
        handle = self._handle()
        return [Sums(tokens, columns, *self._exact(handle, tokens, columns)) for tokens, columns in parts]

    def _judge_experts(self, parts: Mapping[str, bytes], expected: Dispatched, where: str) -> None:
        shape = self.work.shape
        most = shape.ranks * shape.max_tokens
        ranges = np.frombuffer(parts["ranges"], np.int64).reshape(shape.local_experts, shape.ranks)
        same(f"{where}: ranges", ranges, expected.ranges)
        source = np.frombuffer(parts["source"], np.int32).reshape(shape.local_experts, most)
        x = self._rows(parts)
        scales = self._expert_scales(parts)
        begin = 0
        for local, count in enumerate(expected.counts.tolist()):
            assert expected.source is not None
            of = f"{where}: expert {local}"
            same(f"{of}: source", source[local, :count], expected.source[local, :count])
            rows = x[begin : begin + count]
            same(f"{of}: x", rows[:, self.columns], expected.x[local, :count])
            if scales is not None and expected.scales is not None:
                same(f"{of}: scales", scales[local, :count][:, self.blocks], expected.scales[local, :count])
            begin += count
        ends = np.cumsum(expected.counts)
        for row in self._some(len(x), WHOLE_ROWS):
            local = int(np.searchsorted(ends, row, side="right"))
            place = row - (int(ends[local]) - int(expected.counts[local]))
            starts = ranges[local] >> 32
            counts = ranges[local] & 0xFFFF_FFFF
            (home,) = np.flatnonzero((starts <= place) & (place < starts + counts))
            token = int(source[local, place])
            factors = None if scales is None else scales[local, place]
            self._judge_row(f"{where}: expert {local}, row {place}", x[row], factors, int(home), token)

    def _judge_ranks(self, parts: Mapping[str, bytes], expected: Dispatched, where: str) -> None:
        shape = self.work.shape
        offsets = np.frombuffer(parts["offsets"], np.int64)
        same(f"{where}: offsets", offsets, expected.offsets)
        x = self._rows(parts)
        indices = np.frombuffer(parts["topk_idx"], np.int64).reshape(-1, shape.topk)
        same(f"{where}: topk_idx", indices, expected.topk_idx)
        weights = np.frombuffer(parts["topk_weights"], np.float32).reshape(-1, shape.topk)
        same(f"{where}: topk_weights", weights, expected.topk_weights)
        same(f"{where}: x", x[:, self.columns], expected.x)
        scales = None
        if expected.scales is not None:
            scales = np.frombuffer(parts["scales"], expected.scales.dtype).reshape(-1, shape.hidden // BLOCK)
            same(f"{where}: scales", scales[:, self.blocks], expected.scales)
        homes = shape.homes
        for row in self._some(len(x), WHOLE_ROWS):
            home = int(np.searchsorted(offsets, row, side="right")) - 1
            sent = np.flatnonzero((homes(self.inputs[home].topk_idx) == self.rank).any(axis=1))
            token = int(sent[row - int(offsets[home])])
            self._judge_row(f"{where}: row {row}", x[row], None if scales is None else scales[row], home, token)

    def _judge_row(self, where: str, row: Any, scales: Any, home: int, token: int) -> None:
        """Compares a complete row with token `token` of rank `home`."""
        sent = self.inputs[home].x[token]
        if self.work.scale is None:
            same(where, row, sent)
            return
        values, factors = cast_rows(sent[None], self.work.scale)
        same(where, row, values[0])
        same(f"{where}: scales", scales, factors[0])

    def _exact(self, handle: Handle, tokens: I64, columns: I64) -> tuple[Any, Any]:
        """Sums of `tokens` of this rank, in `columns`, and their bound."""
        shape = replace(self.work.shape, hidden=len(columns))
        idx, rows = handle.topk_idx[self.rank], handle.rows[self.rank]
        assert idx is not None and rows is not None
        idx, rows = idx[tokens], rows[tokens]
        # Outputs are stored by the token's own index, so that only those of `tokens` are needed.
        ys = [self._outputs_of(home, idx, rows, columns) for home in range(shape.ranks)]
        places = np.where(rows >= 0, np.arange(len(tokens))[:, None], -1)
        none = [None] * shape.ranks
        weights: list[Any] | None = None
        if handle.topk_weights is not None:
            given = handle.topk_weights[self.rank]
            assert given is not None
            weights = [*none]
            weights[self.rank] = given[tokens]
        routing: list[Any] = [*none]
        routing[self.rank] = idx
        where: list[Any] = [*none]
        where[self.rank] = places
        # Only this rank has tokens; all ranks have outputs.
        for rank in range(shape.ranks):
            if rank != self.rank:
                routing[rank], where[rank] = idx[:0], places[:0]
                if weights is not None:
                    weights[rank] = weights[self.rank][:0]
        part = Handle(shape, handle.layout, handle.active, routing, weights, where)
        found = combine_exact(ys, part, prereduce=self.work.prereduce, node=self.node)[self.rank]
        assert found is not None
        return found

    def _outputs_of(self, home: int, idx: I64, rows: I64, columns: I64) -> U16:
        """Outputs of the experts of `home` for these selections: [local experts, T, columns], or [T, columns]."""
        shape = self.work.shape
        pattern = outputs(self.work, home)[:, columns]
        here = (rows >= 0) & (shape.homes(idx) == home)
        if self.work.layout == "rank":
            first = np.where(here, rows, -1).max(axis=1)
            answer: U16 = pattern[np.maximum(first, 0) % PERIOD]
            return answer
        made = np.zeros((shape.local_experts, len(idx), len(columns)), np.uint16)
        tokens, selections = np.nonzero(here)
        local = idx[tokens, selections] - home * shape.local_experts
        made[local, tokens] = pattern[(local * shape.ranks * shape.max_tokens + rows[tokens, selections]) % PERIOD]
        return made

    @cached_property
    def _arriving(self) -> Dispatched:
        """The reference dispatch to this rank, restricted to the chosen columns."""
        homes = self.work.shape.homes
        chosen = [np.where(homes(one.topk_idx) == self.rank, one.topk_idx, -1) for one in self.inputs]
        received = self._dispatched([one.x[:, self.columns] for one in self.inputs], chosen, self.work.scale)[self.rank]
        assert received is not None
        return received

    def _handle(self) -> Handle:
        """The routing of all ranks."""
        none = [one.x[:, :0] for one in self.inputs]
        received = self._dispatched(none, [one.topk_idx for one in self.inputs], None)[self.rank]
        assert received is not None
        return received.handle

    def _dispatched(self, xs: Sequence[Any], topk_idx: Sequence[Any], scale: Any) -> list[Dispatched | None]:
        shape = replace(self.work.shape, hidden=xs[0].shape[1])
        weights = [one.topk_weights for one in self.inputs]
        return dispatch(shape, xs, topk_idx, weights, self.work.layout, scale=scale)

    def _rows(self, parts: Mapping[str, bytes]) -> Any:
        dtype = np.uint16 if self.work.scale is None else np.uint8
        return np.frombuffer(parts["x"], dtype).reshape(-1, self.work.shape.hidden)

    def _expert_scales(self, parts: Mapping[str, bytes]) -> Any:
        """Scales as [local experts, rows, blocks], whatever their layout in memory."""
        shape = self.work.shape
        lead = (shape.local_experts, -1, shape.ranks * shape.max_tokens)
        if self.work.scale is None:
            return None
        if self.work.scale == "ue8m0":
            packed = np.frombuffer(parts["scales"], np.uint8).reshape(*lead, 4)
            whole = packed.transpose(0, 2, 1, 3).reshape(lead[0], lead[2], -1)
            return whole[..., : shape.hidden // BLOCK]
        return np.frombuffer(parts["scales"], np.float32).reshape(lead).transpose(0, 2, 1)

    def _some(self, count: int, most: int) -> list[int]:
        """A reproducible sample of the numbers below `count`."""
        rng = np.random.default_rng([self.work.seed, self.rank, self.turn, count])
        chosen: list[int] = rng.choice(count, min(count, most), replace=False).tolist()
        return chosen
