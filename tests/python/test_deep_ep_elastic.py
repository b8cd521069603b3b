"""crossrail.deep_ep.ElasticBuffer: its surface, and its operations on ranks that are threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import deep_ep_elastic as elastic
import pytest
from deep_ep_twin import TwinElastic, on_ranks
from host_torch import torch, torch_is_there

from crossrail import ClosedError, UsageError, deep_ep
from crossrail.deep_ep.elastic.sizes import buffer_bytes

__all__ = ["torch_is_there"]

SIZES: dict[str, Any] = {"num_max_tokens_per_rank": elastic.MOST, "hidden": 1024}


def run(size: int, what: Callable[..., None], *arguments: Any, options: dict[str, Any] = SIZES, **named: Any) -> None:
    on_ranks(size, lambda buffer: what(elastic.Env(torch, buffer), *arguments, **named), TwinElastic, **options)


# Names and defaults of what programs call, as DeepEP's second version has them.
SURFACE = {
    "__init__": (
        "group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0, "
        "use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True, "
        "prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300, "
        "num_gpu_timeout_secs=100, explicitly_destroy=False"
    ),
    "destroy": "",
    "get_buffer_size_hint": (
        "group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False, allow_hybrid_mode=True, "
        "allow_multiple_reduction=True"
    ),
    "barrier": "use_comm_stream=True, with_cpu_sync=False, sequential=True",
    "capture": "",
    "get_comm_stream": "",
    "get_physical_domain_size": "",
    "get_logical_domain_size": "",
    "get_theoretical_num_sms": (
        "num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, sm_read_gbs=200, sm_write_gbs=50"
    ),
    "get_theoretical_num_qps": "num_sms",
    "dispatch": (
        "x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None, "
        "num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None, "
        "previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False, "
        "handle=None, do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False, "
        "use_tma_aligned_col_major_sf=False"
    ),
    "combine": (
        "x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None, "
        "previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False"
    ),
}


@pytest.mark.parametrize("name", SURFACE)
def test_the_surface(name: str) -> None:
    parameters = inspect.signature(getattr(deep_ep.ElasticBuffer, name)).parameters.values()
    empty = inspect.Parameter.empty
    found = [one.name + ("" if one.default is empty else f"={one.default!r}") for one in parameters]
    assert ", ".join(one for one in found if one != "self") == SURFACE[name]


@pytest.mark.parametrize(
    "name",
    [
        "get_engram_storage_size_hint",
        "engram_write",
        "engram_fetch",
        "get_pp_buffer_size_hint",
        "pp_set_config",
        "pp_send",
        "pp_recv",
        "get_agrs_num_max_session_bytes",
        "get_agrs_buffer_size_hint",
        "create_agrs_session",
        "destroy_agrs_session",
        "agrs_new_session",
        "agrs_set_config",
        "agrs_get_inplace_tensor",
        "all_gather",
    ],
)
def test_other_parallelisms_are_refused_by_name(name: str) -> None:
    def one(buffer: TwinElastic) -> None:
        with pytest.raises(NotImplementedError, match=rf"^ElasticBuffer\.{name}: "):
            getattr(buffer, name)(1)

    on_ranks(1, one, TwinElastic, **SIZES)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["bf16", "f32", "packed", "opaque"])
def test_exchange(size: int, kind: str) -> None:
    run(size, elastic.exchange, 10 + size, kind, alignment=1 + 7 * (size % 2), biases=size % 3)


@pytest.mark.parametrize("alignment", [1, 8])
def test_without_waiting_for_counts(alignment: int) -> None:
    run(2, elastic.exchange, 20, "f32", alignment=alignment, sync=False)


@pytest.mark.parametrize("biases", [0, 1, 2])
def test_outputs_that_are_summed_once(biases: int) -> None:
    run(2, elastic.exchange, 30, biases=biases, options=SIZES | {"allow_multiple_reduction": False})


def test_beside_the_current_stream() -> None:
    run(2, elastic.exchange, 40, previous=True, asynchronous=True)


def test_barriers() -> None:
    run(3, elastic.barriers)


def test_domains_and_sizes() -> None:
    def one(buffer: TwinElastic) -> None:
        assert buffer.get_logical_domain_size() == (1, 3) == (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks)
        assert buffer.get_physical_domain_size() == (2, 1 if buffer.rank_idx == 2 else 2)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, buffer.rank_idx)
        assert buffer.get_theoretical_num_qps(24) == buffer.num_allocated_qps == 17
        assert buffer.num_bytes == 2 << 20

    on_ranks(3, one, TwinElastic, **SIZES)


def test_the_hint_is_enough_for_both_types_of_rows() -> None:
    planned: list[Any] = []

    def plan(kind: Any, tokens: int) -> int:
        planned.append((kind.payload, kind.topk, tokens, kind.experts))
        return (5 << 20) + (kind.payload == "f32")

    assert buffer_bytes(4, 100, 256, 0, plan) == 6 << 20
    assert planned == [("bf16", 32, 128, 4 * 256), ("f32", 32, 128, 4 * 256)]
    with pytest.raises(UsageError, match="hidden is 100"):
        buffer_bytes(4, 100, 100, 8, plan)


def test_a_kind_that_takes_more_than_num_bytes() -> None:
    def one(buffer: TwinElastic) -> None:
        x, idx = torch.zeros(2, 512, dtype=torch.bfloat16), torch.tensor([[0], [1]])
        with pytest.raises(UsageError, match="256 tokens of 512 take 3560 bytes, and num_bytes is 2300"):
            buffer.dispatch(x, idx, num_experts=2, num_max_tokens_per_rank=200)
        buffer.dispatch(x, idx, num_experts=2, num_max_tokens_per_rank=2)
        buffer.barrier()

    on_ranks(1, one, TwinElastic, num_bytes=2300)


def test_dispatches_of_a_few_tokens_have_memory_of_their_own() -> None:
    def one(buffer: TwinElastic) -> list[int]:
        for most in (200, 8, 128, 256, 300, 4):
            x, idx = torch.zeros(2, 512, dtype=torch.bfloat16), torch.tensor([[0], [1]])
            got, *_ = buffer.dispatch(x, idx, num_experts=2, num_max_tokens_per_rank=most, do_cpu_sync=False)
            assert len(got) == most
        return [made.most for made in buffer._backend.made]  # type: ignore[attr-defined]

    # Large ones for the buffer's tokens at least, and again when there are more.
    assert on_ranks(1, one, TwinElastic, num_max_tokens_per_rank=256, hidden=512) == [[256, 128, 384]]


def test_nothing_is_made_in_a_capture() -> None:
    def one(buffer: TwinElastic) -> None:
        buffer._backend.streams.capturing = True  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="run it once before the capture"):
            buffer.dispatch(X, IDX, num_experts=4, do_cpu_sync=False)
        buffer._backend.streams.capturing = False  # type: ignore[attr-defined]
        buffer.dispatch(X, IDX, num_experts=4)
        buffer._backend.streams.capturing = True  # type: ignore[attr-defined]
        *_, handle, _ = buffer.dispatch(X, IDX, num_experts=4, do_cpu_sync=False)
        assert "recv_src_metadata" in vars(handle), "what a replay changes was not computed in the capture"

    on_ranks(1, one, TwinElastic, **SIZES)


def test_scales_that_are_not_looked_at() -> None:
    def one(buffer: TwinElastic) -> None:
        scales = torch.tensor([[1, -1, 0x7F800001, 5], [6, 7, 8, -9]], dtype=torch.int32)
        x = (torch.zeros(2, 512, dtype=torch.float8_e4m3fn), scales)
        for expand in (False, True):
            (rows, got), *_ = buffer.dispatch(x, torch.tensor([[0], [0]]), num_experts=2, do_expand=expand)
            assert got.dtype == torch.int32 and got.tolist() == scales.tolist() and len(rows) == 2

    on_ranks(1, one, TwinElastic, **SIZES)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({}, UsageError, "neither num_bytes, nor num_max_tokens_per_rank and hidden"),
        ({"num_bytes": 1, "num_cpu_bytes": 1}, NotImplementedError, "num_cpu_bytes"),
        ({"num_bytes": -1}, UsageError, "num_bytes is -1"),
        ({"num_max_tokens_per_rank": 1.5, "hidden": 8}, UsageError, "num_max_tokens_per_rank is a float"),
    ],
)
def test_wrong_arguments_of_a_buffer(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        on_ranks(1, lambda buffer: None, TwinElastic, **options)


X, IDX = torch.zeros(3, 512, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, -1], [-1, -1]])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_experts": None}, "num_experts is None"),
        ({"num_experts": 0}, "num_experts 0"),
        ({"topk_idx": None}, "topk_idx is a NoneType"),
        ({"topk_idx": IDX[:2]}, r"topk_idx: expected int64 \[3, K\], got int64 \[2, 2\]"),
        ({"topk_weights": torch.ones(3, 3)}, r"topk_weights: expected float32 \[3, 2\], got float32 \[3, 3\]"),
        ({"num_max_tokens_per_rank": 2}, "x has 3 tokens, num_max_tokens_per_rank is 2"),
        ({"expert_alignment": 0}, "expert_alignment is 0"),
        ({"do_zero_padding": True}, "do_zero_padding needs do_expand"),
        ({"x": X.float()}, r"x: expected bfloat16 \[T, H\], got float32"),
        ({"num_qps": -1}, "num_qps is -1"),
        ({"handle": 5}, "handle is an int"),
    ],
)
def test_wrong_arguments_of_dispatch(changed: dict[str, Any], said: str) -> None:
    def one(buffer: TwinElastic) -> None:
        good = {"x": X, "topk_idx": IDX, "topk_weights": torch.ones(3, 2), "num_experts": 4}
        with pytest.raises(UsageError, match=said):
            buffer.dispatch(**(good | changed))
        buffer.dispatch(**good)

    on_ranks(1, one, TwinElastic, **SIZES)


def test_handles_that_do_not_fit() -> None:
    def one(buffer: TwinElastic) -> None:
        got, _, weights, handle, _ = buffer.dispatch(X, IDX, torch.ones(3, 2), num_experts=4)
        wide, _, wide_weights, expanded, _ = buffer.dispatch(X, IDX, torch.ones(3, 2), num_experts=4, do_expand=True)
        for arguments, said in (
            ({"topk_idx": IDX}, "topk_idx and a handle"),
            ({"do_cpu_sync": True}, "do_cpu_sync and a handle"),
            ({"cumulative_local_expert_recv_stats": X}, "counts new routings, and a handle repeats one"),
            ({"do_expand": True}, "do_expand is True, that of the handle False"),
            ({"num_experts": 8}, "num_experts is 8, that of the handle 4"),
            ({"x": X[:2]}, r"x has shape \[2, 512\], that of the handle \[3, 512\]"),
        ):
            with pytest.raises(UsageError, match=said):
                buffer.dispatch(**({"x": X, "handle": handle} | arguments))
        for arguments, said in (
            ({"handle": (1, 2)}, "handle is a tuple"),
            ({"x": got[:1]}, "x has 1 rows, the result of the dispatch 2"),
            ({"topk_weights": weights[:1]}, "topk_weights has 1 rows, the result of the dispatch 2"),
            ({"topk_weights": wide_weights}, r"topk_weights: expected float32 \[N, 2\], got float32 \[3\]"),
            ({"bias": torch.zeros(3, 512)}, r"bias: expected bfloat16 .*, got float32"),
        ):
            with pytest.raises(UsageError, match=said):
                buffer.combine(**({"x": got, "handle": handle} | arguments))
        if not buffer.allow_multiple_reduction:
            with pytest.raises(UsageError, match="need allow_multiple_reduction"):
                buffer.combine(wide, expanded, wide_weights)

    for allowed in (True, False):
        on_ranks(1, one, TwinElastic, **SIZES, allow_multiple_reduction=allowed)


def test_a_destroyed_buffer_says_so() -> None:
    def one(buffer: TwinElastic) -> None:
        buffer.dispatch(X, IDX, num_experts=4)
        buffer.destroy()
        buffer.destroy()
        assert all(made.destroyed for made in buffer._backend.made)  # type: ignore[attr-defined]
        with pytest.raises(ClosedError, match="the buffer was destroyed"):
            buffer.dispatch(X, IDX, num_experts=4)

    on_ranks(1, one, TwinElastic, **SIZES)
