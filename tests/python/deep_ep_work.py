"""What a rank does to check crossrail.deep_ep against the reference: on GPUs, and on the twin that needs none.

Every rank knows what all ranks send, and what has to come. A difference is an AssertionError that says where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from crossrail import CrossrailError, MismatchError, ref

HIDDEN = 1024
TOPK = 4
MOST = 48


@dataclass
class Env:
    """A rank: its deep_ep.Buffer, and torch."""

    torch: Any
    buffer: Any
    experts: int = 16
    hidden: int = HIDDEN
    topk: int = TOPK
    keep: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return int(self.buffer.rank)

    @property
    def size(self) -> int:
        return int(self.buffer.group_size)

    @property
    def device(self) -> Any:
        return self.buffer._backend.device

    def shape(self, most: int) -> ref.Shape:
        return ref.Shape(self.size, most, self.hidden, self.experts, self.topk)

    def put(self, array: Any, dtype: str | None = None) -> Any:
        """An array as a tensor; bf16 and e4m3 from their bits."""
        tensor = self.torch.from_numpy(np.ascontiguousarray(array.view(f"i{array.dtype.itemsize}") if dtype else array))
        return (tensor.view(getattr(self.torch, dtype)) if dtype else tensor).to(self.device)

    def bits(self, tensor: Any) -> Any:
        """The bits of bf16 or e4m3, on the host."""
        wide = self.torch.int16 if tensor.element_size() == 2 else self.torch.uint8
        found = tensor.contiguous().view(wide).cpu().numpy()
        return found.view(f"u{tensor.element_size()}")


@dataclass
class Batch:
    """What all ranks send, and what has to come."""

    xs: list[Any]
    idx: list[Any]
    weights: list[Any]

    @staticmethod
    def of(env: Env, seed: int, tokens: list[int]) -> Batch:
        xs, idx, weights = [], [], []
        for rank in range(env.size):
            rng = np.random.default_rng((seed, rank))
            one, two = ref.route("uniform", tokens[rank], env.shape(max(*tokens, 1)), rng)
            one[rng.random(one.shape) < 0.1] = -1
            xs.append(ref.bf16_bits(rng.standard_normal((tokens[rank], env.hidden), np.float32)))
            idx.append(one)
            weights.append(two)
        return Batch(xs, idx, weights)


def some_tokens(env: Env, seed: int, most: int = MOST) -> list[int]:
    """Different on each rank, the same for all to see."""
    return [int(n) for n in np.random.default_rng(seed).integers(1, most + 1, env.size)]


def answers(values: Any, first_expert: int) -> Any:
    """What experts say to rows fp32 [El, rows, H]: bits of bf16."""
    factors = 1 + np.arange(first_expert, first_expert + len(values), dtype=np.float32)
    return ref.bf16_bits(values * factors[:, None, None])


def same(found: Any, wanted: Any, what: str) -> None:
    """Equal in shape and in every bit."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, f"{what}: shape {found.shape}, wanted {wanted.shape}"
    if (found != wanted).any():
        at = tuple(int(i) for i in np.argwhere(found != wanted)[0])
        count = int((found != wanted).sum())
        raise AssertionError(f"{what}: {count} of {found.size} differ, first at {at}: {found[at]}, not {wanted[at]}")


def near(found_bits: Any, exact: Any, what: str) -> None:
    """bf16 within the bound that the reference gives."""
    sums, bound = exact
    found = ref.bf16_values(found_bits).astype(np.float64)
    assert found.shape == sums.shape, f"{what}: shape {found.shape}, wanted {sums.shape}"
    off = np.abs(found - sums)
    if not (off <= bound).all():
        at = tuple(int(i) for i in np.argwhere(~(off <= bound))[0])
        raise AssertionError(f"{what}: at {at}: expected {sums[at]} within {bound[at]}, got {found[at]}")


def values_of(env: Env, x: Any) -> Any:
    """fp32 values of rows, or of (rows, scales)."""
    if not isinstance(x, tuple):
        return ref.bf16_values(env.bits(x))
    rows, scales = ref.e4m3_values(env.bits(x[0])), x[1].cpu().numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # what is behind the valid rows is anything
        if scales.dtype == np.int32:
            packed = np.ascontiguousarray(scales).view(np.uint8)
            scales = np.ldexp(np.float32(1), packed.astype(np.int32) - 127)
        return rows * np.repeat(scales, 128, axis=-1)


# Normal mode.


def normal(
    env: Env, seed: int, kind: str = "bf16", alignment: int = 1, worst: bool = False, asynchronous: bool = False
) -> tuple[Any, ...]:
    """A dispatch and its combine. Gives what came and the handle."""
    tokens = some_tokens(env, seed)
    batch = Batch.of(env, seed, tokens)
    shape = env.shape(max(tokens))
    came = ref.dispatch(shape, batch.xs, batch.idx, batch.weights, "rank", expert_alignment=alignment)
    mine: Any = came[env.rank]
    x = as_kind(env, batch.xs[env.rank], kind)
    idx, weights = env.put(batch.idx[env.rank]), env.put(batch.weights[env.rank])
    previous = env.buffer.capture() if asynchronous and seed % 2 else None
    per_rank, per_node, per_expert, in_rank, event = env.buffer.get_dispatch_layout(
        idx, env.experts, previous_event=previous, async_finish=asynchronous
    )
    event.current_stream_wait()
    assert per_node is None
    check_layout(env, batch.idx[env.rank], per_rank, per_expert, in_rank)
    room = env.size * max(tokens) if worst else 0
    got, got_idx, got_weights, counts, handle, event = env.buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=idx,
        topk_weights=weights,
        expert_alignment=alignment,
        num_worst_tokens=room,
        async_finish=asynchronous,
    )
    with event:
        pass
    rows = len(mine.x)
    name = f"rank {env.rank}, seed {seed}, {kind}"
    came_rows(env, got, [as_kind(env, one, kind) for one in batch.xs], mine, room or rows, f"{name}: x")
    same(got_idx.cpu()[:rows], mine.topk_idx, f"{name}: topk_idx")
    assert (got_idx.cpu()[rows:] == -1).all(), f"{name}: topk_idx behind the rows is not -1"
    same(got_weights.cpu()[:rows], mine.topk_weights, f"{name}: topk_weights")
    assert counts == ([] if worst else mine.counts.tolist()), f"{name}: counts {counts}, not {mine.counts.tolist()}"
    check_handle(env, batch, mine, in_rank, handle, name)
    sums(env, seed, batch, came, handle, room or rows, asynchronous)
    return got, handle, batch, came


def check_handle(env: Env, batch: Batch, mine: Any, in_rank: Any, handle: Any, name: str) -> None:
    """DeepEP's items, in its order: (rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix,
    recv_src_idx, is_token_in_rank, send_head)."""
    prefix, sent, first, source, given, heads = handle
    assert len(handle) == 6 and handle, f"{name}: handle {handle!r}"
    same(handle[0].cpu(), prefix.cpu(), f"{name}: handle[0]")
    same(prefix.cpu()[:, env.rank], mine.offsets[1:], f"{name}: rank_prefix_matrix")
    same(given.cpu(), in_rank.cpu(), f"{name}: is_token_in_rank")
    same(sent.cpu()[:, 0], in_rank.cpu().sum(0), f"{name}: channel_prefix_matrix")
    same(first.cpu(), np.zeros((env.size, 1)), f"{name}: recv_channel_prefix_matrix")
    order = source_rows(env, mine)
    same(source.cpu()[: len(order)], [token for _, token in order], f"{name}: recv_src_idx")
    there = np.asarray(in_rank.cpu())
    same(heads.cpu(), np.where(there, np.cumsum(there, axis=0) - 1, -1), f"{name}: send_head")
    for one in (prefix, sent, first, source, heads):
        assert one.dtype == env.torch.int32, f"{name}: an item is {one.dtype}"


def as_kind(env: Env, rows: Any, kind: str) -> Any:
    """Rows of a rank as dispatch takes them; scales with strides of their own."""
    if kind == "bf16":
        return env.put(rows, "bfloat16")
    q, scales = ref.cast_rows(rows, "ue8m0" if kind == "packed" else "f32")
    if kind == "packed":
        scales = scales.view(np.int32)
    # The blocks of a row lie apart, its neighbours' next to them.
    return env.put(q, "float8_e4m3fn"), env.put(scales.T.copy()).t()


def came_rows(env: Env, got: Any, sent: list[Any], mine: Any, rows: int, what: str) -> None:
    """Each row, and its scales, are those of its token."""
    parts = got if isinstance(got, tuple) else (got,)
    there = sent if isinstance(got, tuple) else [(one,) for one in sent]
    order = source_rows(env, mine)
    for number, part in enumerate(parts):
        assert part.shape[0] == rows, f"{what}: {part.shape[0]} rows, wanted {rows}"
        whole = [env.bits(one[number]) if number == 0 else one[number].cpu().numpy() for one in there]
        found = env.bits(part) if number == 0 else part.cpu().numpy()
        wanted = [whole[rank][token] for rank, token in order]
        same(found[: len(order)], np.array(wanted).reshape(len(order), *found.shape[1:]), f"{what}[{number}]")


def source_rows(env: Env, mine: Any) -> list[tuple[int, int]]:
    """(source rank, token) of each row in the rank layout."""
    order = []
    for source in range(env.size):
        here = mine.handle.shape.homes(mine.handle.topk_idx[source]) == env.rank
        order += [(source, int(token)) for token in np.flatnonzero(here.any(axis=1))]
    return order


def check_layout(env: Env, idx: Any, per_rank: Any, per_expert: Any, in_rank: Any) -> None:
    local = env.experts // env.size
    there = np.stack([((idx >= 0) & (idx // local == rank)).any(axis=1) for rank in range(env.size)], axis=1)
    same(in_rank.cpu(), there, "is_token_in_rank")
    same(per_rank.cpu(), there.sum(0), "num_tokens_per_rank")
    same(per_expert.cpu(), [(idx == expert).sum() for expert in range(env.experts)], "num_tokens_per_expert")
    assert (per_rank.dtype, per_expert.dtype) == (env.torch.int32, env.torch.int32)


def sums(env: Env, seed: int, batch: Batch, came: Any, handle: Any, rows: int, asynchronous: bool = False) -> None:
    """A combine of this dispatch, with weights and as many biases as the seed says."""
    rng = [np.random.default_rng((seed, rank, 7)) for rank in range(env.size)]
    ys = [ref.bf16_bits(rng[r].standard_normal(one.x.shape, np.float32)) for r, one in enumerate(came)]
    count = seed % 3
    biases = [
        [ref.bf16_bits(rng[r].standard_normal(batch.xs[r].shape, np.float32)) for _ in range(count)]
        for r in range(env.size)
    ]
    y = np.zeros((rows, env.hidden), np.uint16)
    y[: len(ys[env.rank])] = ys[env.rank]
    back = np.zeros((rows, env.topk), np.float32)
    mine: Any = came[env.rank]
    back[: len(mine.x)] = np.where(mine.topk_idx >= 0, mine.topk_weights, 0)
    bias = [env.put(one, "bfloat16") for one in biases[env.rank]]
    out, weights, event = env.buffer.combine(
        env.put(y, "bfloat16"),
        handle,
        topk_weights=env.put(back),
        bias=None if not bias else bias[0] if count == 1 else tuple(bias),
        async_finish=asynchronous,
    )
    event.current_stream_wait()
    exact: Any = ref.combine_exact(ys, came[0].handle, biases=biases if count else None)[env.rank]
    near(env.bits(out), exact, f"rank {env.rank}, seed {seed}: sums")
    sent = np.where(batch.idx[env.rank] >= 0, batch.weights[env.rank], 0)
    same(weights.cpu(), sent, f"rank {env.rank}, seed {seed}: weights that came back")


def normal_again(env: Env, seed: int) -> None:
    """With a handle: rows of the same kind and of the other one; then the first handle still combines."""
    _, handle, batch, came = normal(env, seed, "bf16")
    mine: Any = came[env.rank]
    rows = len(mine.x)
    for kind in ("bf16", "f32", "bf16"):
        other = Batch.of(env, seed + 50, [len(one) for one in batch.xs])
        x = as_kind(env, other.xs[env.rank], kind)
        again = env.buffer.dispatch(x, handle=handle)
        assert again[1:5] == (None, None, None, None)
        sent = [as_kind(env, one, kind) for one in other.xs]
        came_rows(env, again[0], sent, mine, rows, f"rank {env.rank}: again, {kind}")
    sums(env, seed, batch, came, handle, rows)


def normal_without_ids(env: Env, seed: int) -> None:
    """Only which rank gets which token; counts of experts are what the sources say."""
    tokens = some_tokens(env, seed)
    batch = Batch.of(env, seed, tokens)
    came = ref.dispatch(env.shape(max(tokens)), batch.xs, batch.idx, None, "rank", expert_alignment=8)
    mine: Any = came[env.rank]
    layout = env.buffer.get_dispatch_layout(env.put(batch.idx[env.rank]), env.experts)
    per_rank, _, per_expert, in_rank, _ = layout
    got, idx, weights, counts, handle, _ = env.buffer.dispatch(
        env.put(batch.xs[env.rank], "bfloat16"),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        expert_alignment=8,
    )
    assert idx is None and weights is None
    assert counts == mine.counts.tolist(), f"{counts}, not {mine.counts.tolist()}"
    same(env.bits(got), mine.x, "rows without ids")
    out, weights, _ = env.buffer.combine(got, handle)
    assert weights is None
    ys = [one.x for one in came]
    near(env.bits(out), ref.combine_exact(ys, came[0].handle)[env.rank], "sums without ids")


def normal_kept(env: Env, count: int) -> None:
    """More results than the buffer has memory for, all kept, and all still right at the end."""
    kept = []
    for seed in range(count):
        got, _, batch, came = normal(env, 300 + seed)
        kept.append((got, batch, came[env.rank]))
    for got, batch, mine in kept:
        sent = [as_kind(env, one, "bf16") for one in batch.xs]
        came_rows(env, got, sent, mine, len(mine.x), f"rank {env.rank}: kept")


def normal_grows(env: Env) -> None:
    """One rank has ever more tokens; an older handle goes on working."""
    first = None
    for step, most in enumerate((3, 100, 300, 700)):
        tokens = [most if rank == step % env.size else 2 for rank in range(env.size)]
        batch = Batch.of(env, 400 + step, tokens)
        came = ref.dispatch(env.shape(most), batch.xs, batch.idx, None, "rank")
        idx = env.put(batch.idx[env.rank])
        per_rank, _, per_expert, in_rank, _ = env.buffer.get_dispatch_layout(idx, env.experts)
        got, _, _, _, handle, _ = env.buffer.dispatch(
            env.put(batch.xs[env.rank], "bfloat16"),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=idx,
        )
        mine: Any = came[env.rank]
        same(env.bits(got), mine.x, f"rank {env.rank}: rows of {tokens}")
        first = first or (got.clone(), handle, came)
    x, handle, came = first
    out, _, _ = env.buffer.combine(x, handle)
    near(env.bits(out), ref.combine_exact([one.x for one in came], came[0].handle)[env.rank], "an old handle")


def normal_many(env: Env, count: int) -> None:
    """Dispatches without end, whose handles are all kept: the last is as good as the first."""
    tokens = [400] * env.size
    batch = Batch.of(env, 450, tokens)
    x, idx = env.put(batch.xs[env.rank], "bfloat16"), env.put(batch.idx[env.rank])
    weights = env.put(batch.weights[env.rank])
    per_rank, _, per_expert, in_rank, _ = env.buffer.get_dispatch_layout(idx, env.experts)
    came = ref.dispatch(env.shape(400), batch.xs, batch.idx, batch.weights, "rank")
    exact: Any = ref.combine_exact([one.x for one in came], came[0].handle)[env.rank]
    handles = []
    for _ in range(count):
        got, _, _, counts, handle, _ = env.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=idx,
            topk_weights=weights,
        )
        handles.append(handle)
    mine: Any = came[env.rank]
    assert counts == mine.counts.tolist(), f"rank {env.rank}: counts of the last of {count}"
    same(env.bits(got), mine.x, f"rank {env.rank}: rows of the last of {count}")
    for handle in (handles[0], handles[-1]):
        near(env.bits(env.buffer.combine(got, handle)[0]), exact, f"rank {env.rank}: sums by a handle of {count}")


def normal_refused(env: Env) -> None:
    """What is wrong on the last rank is an error on all, which name it; the next call works."""
    normal(env, 499)
    tokens = [5] * env.size
    batch = Batch.of(env, 500, tokens)
    idx = env.put(batch.idx[env.rank])
    per_rank, _, per_expert, in_rank, _ = env.buffer.get_dispatch_layout(idx, env.experts)
    bad = env.rank == env.size - 1
    x = env.put(batch.xs[env.rank], "bfloat16")
    try:
        env.buffer.dispatch(
            x.float() if bad else x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=idx,
        )
    except CrossrailError as error:
        assert "x: expected bfloat16 [T, H], got float32 [5, " in str(error), error
        assert bad or f"rank {env.size - 1} could not" in str(error), error
    else:
        raise AssertionError("nothing was wrong")
    normal(env, 501)


def normal_mismatched(env: Env) -> None:
    """The last rank gives no weights: an error on all that says so; the next call works."""
    normal(env, 510)
    batch = Batch.of(env, 511, [6] * env.size)
    idx, x = env.put(batch.idx[env.rank]), env.put(batch.xs[env.rank], "bfloat16")
    per_rank, _, per_expert, in_rank, _ = env.buffer.get_dispatch_layout(idx, env.experts)
    last = env.rank == env.size - 1
    try:
        env.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=idx,
            topk_weights=None if last else env.put(batch.weights[env.rank]),
        )
    except MismatchError as error:
        assert "the form of the routing (0: topk_idx, 1: with topk_weights" in str(error), error
        assert (
            "is 0 here and 1 on rank 0" in str(error) if last else f"1 here and 0 on rank {env.size - 1}" in str(error)
        )
    else:
        raise AssertionError("all ranks agreed")
    normal(env, 512)


# Low-latency mode.

PAYLOADS: dict[str, dict[str, bool]] = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "power2": {"round_scale": True},
    "ue8m0": {"round_scale": True, "use_ue8m0": True},
}


def low_latency(
    env: Env, seed: int, payload: str = "fp8", hook: bool = False, asynchronous: bool = False, counted: bool = True
) -> None:
    """A dispatch and its combine. `counted`: with statistics."""
    tokens = some_tokens(env, seed)
    batch = Batch.of(env, seed, tokens)
    scale: Any = {"bf16": None, "fp8": "f32"}.get(payload, payload)
    came = ref.dispatch(env.shape(MOST), batch.xs, batch.idx, None, "expert", scale=scale)
    stats = env.torch.full((env.experts // env.size,), 1000, dtype=env.torch.int32, device=env.device)
    waits = env.torch.zeros(env.size, dtype=env.torch.int64, device=env.device)
    idx = env.put(batch.idx[env.rank])
    got, counts, handle, event, receive = env.buffer.low_latency_dispatch(
        env.put(batch.xs[env.rank], "bfloat16"),
        idx,
        MOST,
        env.experts,
        cumulative_local_expert_recv_stats=stats if counted else None,
        dispatch_wait_recv_cost_stats=waits if counted else None,
        async_finish=asynchronous,
        return_recv_hook=hook,
        **PAYLOADS[payload],
    )
    settle(event, receive, hook)
    name = f"rank {env.rank}, seed {seed}, {payload}"
    mine: Any = came[env.rank]
    expert_rows(env, got, counts, handle, mine, name)
    same(stats.cpu() - 1000, mine.counts if counted else 0 * mine.counts, f"{name}: stats")
    values = values_of(env, got)
    y = env.put(answers(np.where(valid(mine), values, 0), env.rank * mine.handle.shape.local_experts), "bfloat16")
    if seed % 2:
        room = env.buffer.get_next_low_latency_combine_buffer(handle)
        room.copy_(y)
        y = room
    # What is behind the valid rows is not looked at.
    y[env.put(~np.broadcast_to(valid(mine), y.shape))] = float("nan")
    out = None
    if hook:
        out = env.torch.full((tokens[env.rank], env.hidden), float("nan"), dtype=env.torch.bfloat16, device=env.device)
    result, event, receive = env.buffer.low_latency_combine(
        y,
        idx,
        env.put(batch.weights[env.rank]),
        handle,
        zero_copy=bool(seed % 2),
        async_finish=asynchronous,
        return_recv_hook=hook,
        out=out,
        combine_wait_recv_cost_stats=waits if counted else None,
    )
    settle(event, receive, hook)
    assert out is None or result.data_ptr() == out.data_ptr()
    ys = [answers(reference_values(one), r * mine.handle.shape.local_experts) for r, one in enumerate(came)]
    near(env.bits(result), ref.combine_exact(ys, came[0].handle, batch.weights)[env.rank], f"{name}: sums")


def settle(event: Any, receive: Callable[[], None] | None, hook: bool) -> None:
    """What a caller does before it uses a result."""
    assert (receive is not None) == hook
    if receive is not None:
        receive()
    event.current_stream_wait()


def valid(mine: Any) -> Any:
    """Which rows there are: bool [El, rows, 1]."""
    return (np.arange(mine.x.shape[1]) < mine.counts[:, None])[:, :, None]


def reference_values(one: Any) -> Any:
    """fp32 values of what the reference delivers."""
    if one.scales is None:
        return ref.bf16_values(one.x)
    wide = one.scales
    if wide.dtype == np.uint8:
        wide = np.ldexp(np.float32(1), wide.astype(np.int32) - 127)
    return ref.e4m3_values(one.x) * np.repeat(wide, 128, axis=-1)


def expert_rows(env: Env, got: Any, counts: Any, handle: Any, mine: Any, name: str) -> None:
    """Rows, scales, counts and the handle's items, as far as they are valid."""
    x, scales = got if isinstance(got, tuple) else (got, None)
    same(counts.cpu(), mine.counts, f"{name}: counts")
    source, ranges, most, hidden, experts = handle
    assert (most, hidden, experts) == (MOST, env.hidden, env.experts)
    same(ranges.cpu(), mine.ranges, f"{name}: ranges")
    there = valid(mine)
    same(np.where(there, env.bits(x), 0), np.where(there, mine.x, 0), f"{name}: rows")
    same(np.where(there[..., 0], source.cpu(), 0), np.where(there[..., 0], mine.source, 0), f"{name}: sources")
    if mine.scales is None:
        assert scales is None
        return
    assert scales.stride(1) == 1, f"{name}: scales have strides {scales.stride()}"
    found = np.ascontiguousarray(scales.cpu().numpy())
    found = found.view(np.uint8) if mine.scales.dtype == np.uint8 else found
    same(np.where(there, found, 0), np.where(there, mine.scales, 0), f"{name}: scales")


def low_latency_overlapped(env: Env, seed: int) -> None:
    """Two batches under way at once, as two halves of a batch are."""
    halves = []
    for half in range(2):
        tokens = some_tokens(env, seed + half)
        batch = Batch.of(env, seed + half, tokens)
        came = ref.dispatch(env.shape(MOST), batch.xs, batch.idx, None, "expert")
        x, idx = env.put(batch.xs[env.rank], "bfloat16"), env.put(batch.idx[env.rank])
        begun = env.buffer.low_latency_dispatch(x, idx, MOST, env.experts, use_fp8=False, return_recv_hook=True)
        halves.append((batch, came, idx, begun))
    sent = []
    for batch, came, idx, (got, counts, handle, _, receive) in halves:
        receive()
        expert_rows(env, got, counts, handle, came[env.rank], f"rank {env.rank}, half")
        weights = env.put(batch.weights[env.rank])
        y = got.clone()
        sent.append(env.buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=True))
    for (batch, came, _, _), (out, _, receive) in zip(halves, sent, strict=True):
        receive()
        ys = [one.x for one in came]
        near(env.bits(out), ref.combine_exact(ys, came[0].handle, batch.weights)[env.rank], "a half's sums")


def masks(env: Env) -> None:
    """Who is left out is told, and taken back."""
    status = env.torch.full((env.size,), 7, dtype=env.torch.int32, device=env.device)
    env.buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * env.size
    other = (env.rank + 1) % env.size
    env.buffer.low_latency_update_mask_buffer(other, mask=True)
    env.buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(rank == other) for rank in range(env.size)]
    env.buffer.low_latency_clean_mask_buffer()
    env.buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * env.size
