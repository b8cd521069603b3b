"""crossrail.deep_ep on ranks that are threads: tensors, handles, hooks and errors."""

from __future__ import annotations

import weakref
from typing import Any

import deep_ep_work as work
import numpy as np
import pytest
from deep_ep_twin import TwinDeepEp, on_ranks
from host_torch import torch, torch_is_there

from crossrail import ClosedError, UsageError, deep_ep
from crossrail.deep_ep.layouts import dispatch_layout, ids_of_ranks

__all__ = ["torch_is_there"]


def run(size: int, what: Any, *arguments: Any, **options: Any) -> None:
    on_ranks(size, lambda buffer: what(work.Env(torch, buffer), *arguments, **options))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["bf16", "f32", "packed"])
def test_normal(size: int, kind: str) -> None:
    run(size, work.normal, 11 + size, kind, alignment=size)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_normal_without_counts(seed: int) -> None:
    run(2, work.normal, seed, worst=True, asynchronous=True)


def test_normal_again() -> None:
    run(2, work.normal_again, 21)


def test_normal_without_ids() -> None:
    run(4, work.normal_without_ids, 31)


def test_results_are_copied_while_another_is_in_use() -> None:
    def rounds(buffer: TwinDeepEp) -> None:
        env = work.Env(torch, buffer)
        work.normal(env, 41)
        machine_of(buffer).made[0].lent += [1, 2]
        work.normal_kept(env, 3)

    on_ranks(2, rounds)


def test_streams_that_use_a_result(buffer: TwinDeepEp) -> None:
    def recorded(*tensors: Any) -> list[int]:
        users = machine_of(buffer).made[-1].world.buffers[0].regions[-1].users
        before = len(users)
        for number, tensor in enumerate(tensors):
            tensor.record_stream(number)
        return users[before:]

    rows, idx, weights, _, _, _ = call(buffer)
    assert recorded(rows, idx, weights) == [0, 1, 2]
    (rows, scales), _, _, _, _, _ = call(buffer, x=(FP8, torch.ones(3, 1, dtype=torch.int32)))
    assert recorded(rows, scales) == [0, 1]
    died = weakref.ref(rows)
    del rows
    assert died() is None


def test_more_tokens() -> None:
    run(2, work.normal_grows)


def test_the_first_buffer_is_as_large_as_the_program_said() -> None:
    def one(buffer: TwinDeepEp) -> list[int]:
        work.normal(work.Env(torch, buffer), 51)
        return [made.most for made in machine_of(buffer).made]

    assert on_ranks(2, one, num_nvl_bytes=0) == [[128]] * 2
    assert on_ranks(2, one, num_nvl_bytes=1000 + 10 * 1024 + 5) == [[1024]] * 2


def test_the_dtype_of_ids() -> None:
    assert deep_ep.topk_idx_t is torch.int64
    with pytest.raises(AttributeError, match="has no attribute 'topk_idx_u'"):
        _ = deep_ep.topk_idx_u


def test_many_that_are_kept() -> None:
    run(2, work.normal_many, 4)


def test_what_is_wrong_on_one_rank_is_told_to_all() -> None:
    run(4, work.normal_refused)


def test_ranks_that_disagree() -> None:
    run(3, lambda env: work.normal_mismatched(work.Env(torch, env.buffer, experts=18)))


@pytest.mark.parametrize(
    ("experts", "ranks", "tokens", "topk"), [(16, 4, 33, 4), (8, 1, 5, 2), (12, 3, 0, 2), (6, 6, 9, 3)]
)
def test_a_layout(experts: int, ranks: int, tokens: int, topk: int) -> None:
    idx = torch.randint(-1, experts, (tokens, topk))
    if tokens:
        idx[0, 0], idx[-1, -1] = experts + 5, -7
    given, there = idx.clone(), (idx >= 0) & (idx < experts)
    to_ranks, to_experts, in_rank = dispatch_layout(idx, experts, ranks)
    assert torch.equal(idx, given)
    assert to_experts.tolist() == [int((idx == expert).sum()) for expert in range(experts)]
    home = torch.where(there, idx // (experts // ranks), -1)
    assert in_rank.tolist() == [[bool((row == rank).any()) for rank in range(ranks)] for row in home]
    assert to_ranks.tolist() == in_rank.sum(0).tolist()
    assert to_ranks.dtype == to_experts.dtype == torch.int32 and in_rank.is_contiguous()


@pytest.mark.parametrize("payload", work.PAYLOADS)
@pytest.mark.parametrize("hook", [False, True])
def test_low_latency(payload: str, hook: bool) -> None:
    for seed in (61, 62):
        run(2, work.low_latency, seed, payload, hook=hook, asynchronous=not hook)


def test_low_latency_halves() -> None:
    run(2, work.low_latency_overlapped, 71)


def test_masks() -> None:
    def one(buffer: TwinDeepEp) -> None:
        env = work.Env(torch, buffer, experts=18)
        work.masks(env)
        work.low_latency(env, 81)
        work.masks(env)

    on_ranks(3, one)


@pytest.mark.parametrize("shrink", [0, 1])
def test_ranks_meet_when_a_buffer_that_may_shrink_is_cleaned(shrink: int) -> None:
    def one(buffer: TwinDeepEp) -> list[str]:
        buffer.clean_low_latency_buffer(work.MOST, work.HIDDEN, 16)
        work.normal(work.Env(torch, buffer), 91)
        work.low_latency(work.Env(torch, buffer), 92)
        buffer.clean_low_latency_buffer(work.MOST, work.HIDDEN, 16)
        return machine_of(buffer).met

    assert on_ranks(2, one, enable_shrink=shrink) == [["expert"] * shrink] * 2


def test_ranks_that_have_left_are_left_out() -> None:
    def one(buffer: TwinDeepEp) -> None:
        work.low_latency(work.Env(torch, buffer, experts=18), 93)
        (made,) = machine_of(buffer).made
        made.connected = lambda: [0, 1]
        status = torch.zeros(3, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, 0, 1]

    on_ranks(3, one)


def alone(buffer: TwinDeepEp) -> TwinDeepEp:
    return buffer


def machine_of(buffer: TwinDeepEp) -> Any:
    """The double that it runs on."""
    return buffer._backend


@pytest.fixture
def buffer() -> TwinDeepEp:
    (made,) = on_ranks(1, alone)
    return made


def call(buffer: TwinDeepEp, **changed: Any) -> Any:
    """A normal dispatch of three tokens, with these arguments in place of good ones."""
    idx = torch.tensor([[0, 1], [2, -1], [-1, -1]])
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
    good = {
        "x": torch.zeros(3, 512, dtype=torch.bfloat16),
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": idx,
        "topk_weights": torch.ones(3, 2),
    }
    return buffer.dispatch(**(good | changed))


FP8 = torch.zeros(3, 512, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": torch.zeros(3, 512)}, "x: expected bfloat16 [T, H], got float32 [3, 512]"),
        ({"x": torch.zeros(512, 3, dtype=torch.bfloat16).t()}, "x is not contiguous"),
        ({"x": [1]}, "x is a list"),
        ({"x": (FP8,)}, "x is a tuple of 1"),
        ({"x": (FP8, torch.ones(3, 3))}, "x[1]: expected float32 [3, 4] or int32 [3, 1], got float32 [3, 3]"),
        ({"x": (FP8, torch.ones(3, 4).double())}, "x[1]: expected float32 or int32, got float64 [3, 4]"),
        ({"num_tokens_per_expert": None}, "num_tokens_per_expert is None"),
        ({"topk_idx": torch.zeros(3, 2, dtype=torch.int32)}, "topk_idx: expected int64 [3, K], got int32"),
        ({"topk_idx": torch.zeros(2, 2, dtype=torch.int64)}, "topk_idx: expected int64 [3, K], got int64 [2, 2]"),
        ({"topk_weights": torch.ones(3, 3)}, "topk_weights: expected float32 [3, 2], got float32 [3, 3]"),
        ({"topk_idx": None}, "topk_weights without topk_idx"),
        ({"topk_idx": None, "topk_weights": None, "is_token_in_rank": None}, "neither topk_idx nor is_token_in_rank"),
        ({"expert_alignment": 0}, "expert_alignment is 0"),
        ({"num_worst_tokens": -1}, "num_worst_tokens is -1"),
        ({"config": 20}, "config is an int"),
        ({"handle": (1, 2)}, "handle is a tuple"),
    ],
)
def test_wrong_arguments_of_dispatch(buffer: TwinDeepEp, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        call(buffer, **changed)
    assert said in str(raised.value)
    call(buffer)


def test_rows_that_are_not_those_of_the_handle(buffer: TwinDeepEp) -> None:
    handle = call(buffer)[4]
    with pytest.raises(UsageError, match=r"x has shape \[4, 512\], that of the handle \[3, 512\]"):
        buffer.dispatch(torch.zeros(4, 512, dtype=torch.bfloat16), handle)


def test_wrong_arguments_of_combine(buffer: TwinDeepEp) -> None:
    got, _, _, _, handle, _ = call(buffer)
    with pytest.raises(UsageError, match=r"x: expected bfloat16 \[2, 512\], got bfloat16 \[1, 512\]"):
        buffer.combine(got[:1], handle)
    with pytest.raises(UsageError, match=r"bias: expected bfloat16 .*, got float32"):
        buffer.combine(got, handle, bias=torch.zeros(3, 512))
    with pytest.raises(UsageError, match="topk_weights: expected"):
        buffer.combine(got, handle, topk_weights=torch.zeros(2, 3))
    with pytest.raises(UsageError, match="handle is of a normal dispatch"):
        buffer.low_latency_combine(got, None, None, handle)
    buffer.combine(got, handle, bias=(torch.zeros(3, 512, dtype=torch.bfloat16),) * 2)


def test_wrong_arguments_of_low_latency(buffer: TwinDeepEp) -> None:
    x, idx = torch.zeros(3, 512, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, -1], [-1, -1]])
    for options, said in (
        ({"async_finish": True, "return_recv_hook": True}, "exclude each other"),
        ({"use_ue8m0": True}, "use_ue8m0 needs round_scale"),
    ):
        with pytest.raises(UsageError, match=said):
            buffer.low_latency_dispatch(x, idx, 4, 4, **options)
    with pytest.raises(UsageError, match="x has 3 tokens, num_max_dispatch_tokens_per_rank is 2"):
        buffer.low_latency_dispatch(x, idx, 2, 4)
    with pytest.raises(UsageError, match="H is 384, not a multiple of 512"):
        buffer.low_latency_dispatch(x[:, :384].contiguous(), idx, 4, 4, round_scale=True, use_ue8m0=True)
    got, _, handle, _, hook = buffer.low_latency_dispatch(x, idx, 4, 4, use_fp8=False)
    assert hook is None
    with pytest.raises(UsageError, match="use_logfmt and zero_copy exclude each other"):
        buffer.low_latency_combine(got, idx, torch.ones(3, 2), handle, use_logfmt=True, zero_copy=True)
    with pytest.raises(UsageError, match="get_next_low_latency_combine_buffer"):
        buffer.low_latency_combine(got, idx, torch.ones(3, 2), handle, zero_copy=True)
    with pytest.raises(UsageError, match=r"out: expected bfloat16 .*, got float32"):
        buffer.low_latency_combine(got, idx, torch.ones(3, 2), handle, out=torch.zeros(3, 512))
    with pytest.raises(UsageError, match="handle is of a low-latency dispatch"):
        buffer.combine(got, handle)


@pytest.mark.parametrize("with_ranks", [True, False])
def test_handles_of_more_than_a_node_have_ten_items(with_ranks: bool) -> None:
    def one(buffer: TwinDeepEp) -> None:
        idx = torch.tensor([[2 * buffer.rank + 1, 0], [16, -1], [-1, -1]])
        ranks, nodes, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 18)
        assert nodes.tolist() == [1, 1 + (buffer.rank == 8)] and nodes.dtype == torch.int32
        x = torch.zeros(3, 512, dtype=torch.bfloat16)
        given = in_rank if with_ranks else None
        *_, handle, _ = buffer.dispatch(x, None, ranks, nodes, given, per_expert, idx)
        assert len(handle) == len(tuple(handle)) == 10 and "3 tokens" in repr(handle)
        ends, source = handle[-4].tolist(), handle[7].tolist()
        senders = {0: range(9), 8: [source for source in range(9) for _ in range(1 + (source == 8))]}
        mine = list(senders.get(buffer.rank, [buffer.rank]))
        assert ends == [sum(source <= rank for source in mine) for rank in range(9)]
        assert len(source) == len(mine) and torch.equal(handle[0], in_rank)

    on_ranks(9, one)


@pytest.mark.parametrize("rdma", [False, True])
def test_scratch_memory_of_the_buffers_size(rdma: bool) -> None:
    def one(buffer: TwinDeepEp) -> None:
        def shown(dtype: Any, size: Any = None, offset: int = 0) -> Any:
            return buffer.get_local_buffer_tensor(dtype, size, offset, use_rdma_buffer=rdma)

        whole = shown(torch.int8)
        assert whole.shape == (400 if rdma else 80,) and whole.dtype == torch.int8
        whole.fill_(0)
        assert shown(torch.float32, (3, 4), 8).shape == (3, 4)
        name = "num_rdma_bytes" if rdma else "num_nvl_bytes"
        with pytest.raises(
            UsageError, match=f"96 elements from 8 on do not fit: {name} hold {100 if rdma else 20} elements"
        ):
            shown(torch.float32, (96,), 8)
        with pytest.raises(UsageError, match="offset is -1"):
            shown(torch.int8, offset=-1)

    on_ranks(1, one, num_nvl_bytes=80, num_rdma_bytes=400)


def test_buffers_are_not_made_in_a_capture(buffer: TwinDeepEp) -> None:
    machine_of(buffer).streams.capturing = True
    with pytest.raises(UsageError, match="num_worst_tokens is needed in a capture"):
        call(buffer)
    with pytest.raises(UsageError, match="run it once before the capture"):
        call(buffer, num_worst_tokens=4)
    machine_of(buffer).streams.capturing = False
    call(buffer)
    machine_of(buffer).streams.capturing = True
    assert call(buffer, num_worst_tokens=4)[0].shape == (4, 512)


def test_a_destroyed_buffer_says_so(buffer: TwinDeepEp) -> None:
    call(buffer)
    buffer.destroy()
    buffer.destroy()
    assert all(made.destroyed for made in machine_of(buffer).made)
    with pytest.raises(ClosedError, match="the buffer was destroyed"):
        call(buffer)
    with pytest.raises(ClosedError):
        buffer.low_latency_clean_mask_buffer()


@pytest.mark.parametrize(("ranks", "topk"), [(1, 1), (2, 4), (4, 4), (8, 3)])
def test_ids_send_tokens_where_they_go(ranks: int, topk: int) -> None:
    goes = np.random.default_rng(ranks).random((50, ranks)).argsort(1) < min(ranks, topk)
    goes[::7] = False
    ids = ids_of_ranks(torch.from_numpy(goes), 3 * ranks, topk)
    assert tuple(ids.shape) == (50, topk) and ids.dtype == torch.int64
    assert torch.equal(dispatch_layout(ids, 3 * ranks, ranks)[2], torch.from_numpy(goes))
