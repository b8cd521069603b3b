"""What serving engines call of `deep_ep`, in their order and with their arguments: vLLM's and SGLang's dispatchers.

Programs of our own: each is one layer of experts on a micro-batch, and stops (`yield`) where an engine goes on with
another micro-batch. Run on GPUs, and on the twin that needs none, against sums in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import deep_ep_work as work
import numpy as np

from crossrail import ref

TOKENS = 24
"""Of each rank in a micro-batch, at most; work.MOST is what a low-latency buffer is for."""
Layer: TypeAlias = Generator[None, None, Any]


@dataclass
class Micro:
    """A micro-batch: what this rank sends, and the sums that have to come back."""

    x: Any
    fp8: tuple[Any, Any]
    idx: Any
    weights: Any
    xs: list[Any]

    @staticmethod
    def of(env: Any, seed: int, tokens: int | None = None) -> Micro:
        counts = [tokens] * env.size if tokens else work.some_tokens(env, seed, TOKENS)
        batch = work.Batch.of(env, seed, counts)
        idx, weights = batch.idx[env.rank], batch.weights[env.rank]
        mine = batch.xs[env.rank]
        tensors = (env.put(mine, "bfloat16"), work.as_kind(env, mine, "f32"), env.put(idx), env.put(weights))
        return Micro(*tensors, [mine, idx, weights])

    def becomes(self, other: Micro) -> None:
        """The same tensors, with the values of another."""
        mine, its = ((one.x, *one.fp8, one.idx, one.weights) for one in (self, other))
        for old, new in zip(mine, its, strict=True):
            old.copy_(new)
        self.xs = other.xs

    def check(self, env: Any, out: Any, scale: Any, name: str) -> None:
        """Expert e gives (1 + e) times the row; what comes back is the weighted sum."""
        bits, idx, weights = self.xs
        rows = ref.bf16_values(bits).astype(float)
        if scale is not None:
            q, scales = ref.cast_rows(bits, scale)
            rows = ref.e4m3_values(q).astype(float) * np.repeat(scales, 128, axis=-1)
        factors = np.where(idx >= 0, weights * (1.0 + idx), 0).sum(1)[:, None]
        # Rounded to bf16 for each expert, for each rank and at the end, by 2**-8 at most; and some fp32.
        work.near(env.bits(out), (rows * factors, 2**-6 * np.abs(rows) * factors + 1e-30), name)


def values(env: Any, got: Any) -> Any:
    """fp32 of rows, or of (rows, scales)."""
    if not isinstance(got, tuple):
        return got.float()
    return got[0].float() * got[1].repeat_interleave(128, -1)


def by_rows(env: Any, got: Any, idx: Any, weights: Any) -> Any:
    """The experts' outputs for rows of which each is there once, weighted and summed: bf16 [N, H]."""
    first = env.rank * (env.experts // env.size)
    factors = env.torch.where(idx >= 0, weights * (idx + (1 + first)), 0.0).sum(1)
    return (values(env, got) * factors.view(-1, 1)).to(env.torch.bfloat16)


def by_experts(env: Any, got: Any) -> Any:
    """The experts' outputs for rows by expert: bf16 [El, rows, H]."""
    local = env.experts // env.size
    factors = env.torch.arange(local, device=env.device) + (1 + env.rank * local)
    return (values(env, got) * factors.view(-1, 1, 1)).to(env.torch.bfloat16)


def quantized(micro: Micro, kind: str) -> Any:
    """Rows as an engine that quantizes before the dispatch has them."""
    return micro.fp8 if kind == "f32" else micro.x


# vLLM.


def vllm_high_throughput(env: Any, micro: Micro, kind: str) -> Layer:
    """--all2all-backend deepep_high_throughput."""
    buffer = env.buffer
    previous = buffer.capture()
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx=micro.idx,
        num_experts=env.experts,
        previous_event=previous,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    got, idx, weights, counts, handle, event = buffer.dispatch(
        x=quantized(micro, kind),
        handle=None,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=micro.idx,
        topk_weights=micro.weights,
        expert_alignment=1,
        config=buffer.get_dispatch_config(env.size),
        previous_event=previous,
        async_finish=True,
        allocate_on_comm_stream=False,
    )
    yield
    if event.event is not None:
        event.current_stream_wait()
    assert sum(counts) == int((idx >= 0).sum())
    y = by_rows(env, got, idx, weights)
    yield
    out, none, event = buffer.combine(
        x=y,
        handle=handle,
        topk_weights=None,
        config=buffer.get_combine_config(env.size),
        previous_event=buffer.capture(),
        async_finish=True,
        allocate_on_comm_stream=False,
    )
    assert none is None
    yield
    event.current_stream_wait()
    return out


def vllm_low_latency(env: Any, micro: Micro, kind: str) -> Layer:
    """--all2all-backend deepep_low_latency."""
    got, _, handle, _, hook = env.buffer.low_latency_dispatch(
        micro.x,
        micro.idx,
        work.MOST,
        env.experts,
        use_fp8=kind == "f32",
        round_scale=False,
        use_ue8m0=False,
        async_finish=False,
        return_recv_hook=True,
    )
    yield
    hook()
    y = by_experts(env, got)
    out = env.torch.empty((len(micro.x), env.hidden), dtype=env.torch.bfloat16, device=env.device)
    yield
    _, _, hook = env.buffer.low_latency_combine(
        y, micro.idx, micro.weights, handle, async_finish=False, zero_copy=False, return_recv_hook=True, out=out
    )
    yield
    hook()
    return out


def vllm_second_version(env: Any, micro: Micro, kind: str) -> Layer:
    """--all2all-backend deepep_v2: rows that are not expanded, without waiting for counts."""
    torch = env.torch
    got, idx, weights, handle, event = env.buffer.dispatch(
        x=quantized(micro, kind),
        topk_idx=micro.idx,
        topk_weights=micro.weights,
        num_experts=env.experts,
        num_max_tokens_per_rank=1 << (TOKENS - 1).bit_length(),
        do_expand=False,
        do_cpu_sync=False,
        async_with_compute_stream=False,
    )
    yield
    if event.event is not None:
        event.current_stream_wait()
    # Ids of all experts, in place; -1 behind the rows that came.
    came = torch.arange(len(idx), device=env.device) < handle.psum_num_recv_tokens_per_scaleup_rank[-1]
    idx.copy_(torch.where((idx >= 0) & came.view(-1, 1), idx + env.rank * (env.experts // env.size), -1))
    factors = torch.where(idx >= 0, weights * (idx + 1), 0.0).sum(1).view(-1, 1)
    y = (values(env, got) * factors).to(torch.bfloat16)
    yield
    out, _, event = env.buffer.combine(
        x=y, handle=handle, topk_weights=None, async_with_compute_stream=True, allocate_on_comm_stream=True
    )
    yield
    if event.event is not None:
        event.current_stream_wait()
    return out


def vllm_second_version_expanded(env: Any, micro: Micro, kind: str, sync: bool = True) -> Layer:
    """The same as earlier releases of vLLM call it for prefill: a row for each expert, and counts."""
    torch = env.torch
    got, idx, weights, handle, event = env.buffer.dispatch(
        x=quantized(micro, kind),
        topk_idx=micro.idx,
        topk_weights=micro.weights,
        num_experts=env.experts,
        num_max_tokens_per_rank=TOKENS,
        do_expand=True,
        do_cpu_sync=sync,
        async_with_compute_stream=True,
    )
    yield
    event.current_stream_wait()
    assert idx is None and bool(handle.num_recv_tokens_per_expert_list) == sync
    ends = handle.psum_num_recv_tokens_per_expert
    places = torch.arange(len(weights), device=env.device)
    experts = torch.bucketize(places, ends, right=True).clamp(max=len(ends) - 1)
    factors = weights * (experts + (1 + env.rank * len(ends)))
    y = (values(env, got) * factors.view(-1, 1)).to(torch.bfloat16)
    yield
    out, _, event = env.buffer.combine(y, handle, async_with_compute_stream=True)
    yield
    event.current_stream_wait()
    return out


def vllm_second_version_expanded_no_sync(env: Any, micro: Micro, kind: str) -> Layer:
    """The same without waiting for counts, as in a graph."""
    return vllm_second_version_expanded(env, micro, kind, sync=False)


# SGLang.


def sglang_normal(env: Any, micro: Micro, kind: str) -> Layer:
    """--moe-a2a-backend deepep --deepep-mode normal."""
    buffer = env.buffer
    previous = buffer.capture()
    per_rank, per_node, per_expert, in_rank, previous = buffer.get_dispatch_layout(
        micro.idx, env.experts, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
    )
    got, idx, weights, counts, handle, event = buffer.dispatch(
        quantized(micro, kind),
        topk_idx=micro.idx,
        topk_weights=micro.weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=previous,
        async_finish=True,
        allocate_on_comm_stream=True,
        expert_alignment=128 if kind == "f32" else 1,
        config=buffer.get_dispatch_config(buffer.group_size),
    )
    yield
    event.current_stream_wait()
    assert all(count % 128 == 0 for count in counts) or kind != "f32"
    y = by_rows(env, got, idx, weights)
    yield
    out, _, event = buffer.combine(
        y,
        handle,
        async_finish=True,
        previous_event=buffer.capture(),
        allocate_on_comm_stream=True,
        config=buffer.get_combine_config(buffer.group_size),
    )
    yield
    event.current_stream_wait()
    return out


def sglang_low_latency(env: Any, micro: Micro, kind: str, hook: bool = True) -> Layer:
    """--deepep-mode low_latency, which overlaps two micro-batches by hooks."""
    if env.buffer.low_latency_mode:
        env.buffer.clean_low_latency_buffer(work.MOST, env.hidden, env.experts)
    got, _, handle, event, receive = env.buffer.low_latency_dispatch(
        micro.x,
        micro.idx,
        work.MOST,
        env.experts,
        use_fp8=kind == "f32",
        async_finish=not hook,
        return_recv_hook=hook,
    )
    yield
    receive() if hook else event.current_stream_wait()
    y = by_experts(env, got)
    out, event, receive = env.buffer.low_latency_combine(
        x=y,
        topk_idx=micro.idx,
        topk_weights=micro.weights,
        handle=handle,
        async_finish=not hook,
        return_recv_hook=hook,
    )
    yield
    receive() if hook else event.current_stream_wait()
    return out


def sglang_low_latency_events(env: Any, micro: Micro, kind: str) -> Layer:
    """The same without hooks."""
    return sglang_low_latency(env, micro, kind, hook=False)


PROGRAMS: dict[str, Callable[[Any, Micro, str], Layer]] = {
    one.__name__: one
    for one in (
        vllm_high_throughput,
        vllm_low_latency,
        vllm_second_version,
        vllm_second_version_expanded,
        vllm_second_version_expanded_no_sync,
        sglang_normal,
        sglang_low_latency,
        sglang_low_latency_events,
    )
}
ELASTIC = ("vllm_second_version", "vllm_second_version_expanded", "vllm_second_version_expanded_no_sync")
"""Those of the second version."""
GRAPHS = (
    "vllm_low_latency",
    "vllm_second_version",
    "vllm_second_version_expanded_no_sync",
    "sglang_low_latency",
    "sglang_low_latency_events",
)
"""Those that wait for nothing on the host."""


def in_turns(layers: Sequence[Layer]) -> list[Any]:
    """Runs layers beside each other: each goes on to where it stops, one after the other. What they give."""
    results: list[Any] = [None] * len(layers)
    going = dict(enumerate(layers))
    while going:
        for number, layer in list(going.items()):
            try:
                next(layer)
            except StopIteration as end:
                results[number] = end.value
                del going[number]
    return results


def scale_of(program: str, kind: str) -> str | None:
    return "f32" if kind == "f32" else None


def run(env: Any, program: str, kind: str = "bf16", rounds: int = 3) -> None:
    """Micro-batches one after the other, and two in flight."""
    for number in range(rounds):
        micros = [Micro.of(env, 1000 + 10 * number + half) for half in range(1 + number % 2)]
        outs = in_turns([PROGRAMS[program](env, micro, kind) for micro in micros])
        for half, (micro, out) in enumerate(zip(micros, outs, strict=True)):
            name = f"rank {env.rank}, {program}, {kind}, round {number}, half {half}"
            micro.check(env, out, scale_of(program, kind), name)


def run_in_graph(env: Any, program: str, kind: str = "bf16", replays: int = 3) -> None:
    """Two micro-batches in flight, captured, and replayed with other tokens."""
    torch = env.torch
    micros = [Micro.of(env, 2000 + half, TOKENS) for half in range(2)]

    def layers() -> list[Any]:
        return in_turns([PROGRAMS[program](env, micro, kind) for micro in micros])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layers()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers()
    for number in range(replays):
        for half, micro in enumerate(micros):
            micro.becomes(Micro.of(env, 2100 + 10 * number + half, TOKENS))
        graph.replay()
        for half, (micro, out) in enumerate(zip(micros, outs, strict=True)):
            name = f"rank {env.rank}, {program}, {kind}, replay {number}, half {half}"
            micro.check(env, out, scale_of(program, kind), name)
