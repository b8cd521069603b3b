"""vLLM's and SGLang's own dispatch and combine of experts, unchanged, over the module `deep_ep`: a rank's half.

On a GPU, or on the twin that needs none (test_experts.py). Every rank knows what all ranks send, and PyTorch says what
has to come: rows, their counts, ids and weights in every bit, and the sums, where expert e answers (1 + e) times its
row. What an engine has around these classes are stubs that raise when they are called (absent.py), except what is here:
its configuration, and in place of two compiled kernels the cast to blocks of fp8 and the sum over a token's experts.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from absent import importing, package
from surroundings_of_engines import Config

BLOCK, FP8_MOST = 128, 448.0
MOE = "vllm.model_executor.layers.fused_moe"
QUANTIZATION = "vllm.model_executor.layers.quantization"
DISPATCHER = "sglang.srt.layers.moe.token_dispatcher"
VLLM_PACKAGES = (
    *("vllm", "vllm.model_executor", "vllm.model_executor.layers", MOE, f"{MOE}.prepare_finalize"),
    *(QUANTIZATION, f"{QUANTIZATION}.utils"),
)
"""Without what their `__init__` imports."""
VLLM_ABSENT = (
    *("flashinfer", "cpuinfo", "regex", "psutil", "zmq", "msgspec", "cloudpickle", "cbor2", "numba", "cachetools"),
    *("transformers", "pydantic", "pydantic_core", "PIL", "tqdm", "requests", "yaml"),
    *(f"vllm.{name}" for name in ("_C", "_custom_ops", "_aiter_ops", "config", "distributed", "forward_context")),
    *(f"vllm.{name}" for name in ("platforms", "triton_utils", "v1.worker.workspace", "model_executor.models")),
    *(f"{MOE}.{name}" for name in ("activation", "runner", "routed_experts_capturer", "moe_output")),
    *(f"{QUANTIZATION}.utils.{name}_utils" for name in ("config", "fp8", "int8", "mxfp4", "mxfp6", "mxfp8", "w8a8")),
    *(f"{QUANTIZATION}.utils.{name}_utils" for name in ("nvfp4_emulation", "ocp_mx")),
)
SGLANG_PACKAGES = ("sglang", "sglang.srt.layers", "sglang.srt.layers.moe", DISPATCHER)
SGLANG_ABSENT = (
    *("psutil", "zmq", "msgspec", "orjson", "pybase64", "requests", "aiohttp", "PIL", "opentelemetry"),
    *("packaging", "pydantic", "pydantic_core", "starlette", "fastapi", "sgl_kernel", "torchcodec", "pynvml", "einops"),
    *("torch_memory_saver", "transformers"),
    *(f"sglang.{name}" for name in ("kernels", "srt.configs", "srt.distributed", "srt.eplb", "srt.platforms")),
    *(
        f"sglang.srt.{name}"
        for name in ("layers.dp_attention", "layers.deep_gemm_wrapper", "layers.moe.topk", "runtime_context")
    ),
)


@dataclass(frozen=True)
class Sizes:
    """Of a layer; `tokens`: of a rank, at most."""

    tokens: int
    hidden: int
    experts: int
    topk: int


DECODE = Sizes(128, 7168, 64, 8)
PREFILL = Sizes(4096, 7168, 64, 8)


class Platform:
    """vLLM's, of a machine without its kernels."""

    device_type = "cuda"

    def fp8_dtype(self) -> Any:
        return torch.float8_e4m3fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: False if name.startswith("is_") else None


def cast(x: Any, block: int = BLOCK, **_: Any) -> tuple[Any, Any]:
    """Rows [N, H] as fp8 with a scale [N, H / 128] for each block, as DeepEP's kernels cast them."""
    assert block == BLOCK
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1).clamp(min=1e-4)
    limit = torch.full_like(most, FP8_MOST)  # a number as dividend would be multiplied by the reciprocal
    return (blocks * (limit / most).unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2), most * (1 / FP8_MOST)


def moe_sum(rows: Any, out: Any) -> None:
    """Of each token's experts, rows [N, K, H]: what vLLM's kernel does."""
    out.copy_(rows.sum(1))


@cache
def vllm(site: str) -> SimpleNamespace:
    """Classes of vLLM's published package, which is in this folder."""
    for name in VLLM_PACKAGES:
        package(name, site)
    with importing(*VLLM_ABSENT):
        importlib.import_module("vllm.platforms").current_platform = Platform()
        importlib.import_module(f"{QUANTIZATION}.utils.fp8_utils").per_token_group_quant_fp8 = cast
        importlib.import_module("vllm._custom_ops").moe_sum = moe_sum
        found = [
            importlib.import_module(f"{MOE}.{name}")
            for name in ("prepare_finalize.deepep_ll", "prepare_finalize.deepep_ht", "config", "topk_weight_and_reduce")
        ]
    low_latency, high_throughput, config, reducing = found
    return SimpleNamespace(
        low_latency=low_latency.DeepEPLLPrepareAndFinalize,
        high_throughput=high_throughput.DeepEPHTPrepareAndFinalize,
        config=config.FusedMoEQuantConfig,
        reduced=reducing.TopKWeightAndReduceDelegate(),
    )


@cache
def sglang(site: str) -> Any:
    """The module of SGLang's dispatcher, of the published package in this folder. A batch is of prefill where
    `phase.prefill` is set."""
    for name in SGLANG_PACKAGES:
        package(name, site)
    # One process is one rank, except on the twin, whose ranks are threads.
    phase, resources = threading.local(), threading.local()
    recorder = SimpleNamespace(
        on_deepep_dispatch_low_latency=lambda *_: None, on_deepep_dispatch_normal=lambda *_, **__: None
    )
    around: dict[str, dict[str, Any]] = {
        "runtime_context": {
            "get_server_args": lambda: None,
            "get_flags": lambda: Config(moe=Config(deepep_config="", tbo_enabled=True)),
            "get_resources": lambda: resources,
        },
        "layers.dp_attention": {"get_is_extend_in_batch": lambda: phase.prefill},
        "layers.deep_gemm_wrapper": {
            "ENABLE_JIT_DEEPGEMM": True,
            "DEEPGEMM_BLACKWELL": False,
            "DEEPGEMM_SCALE_UE8M0": False,
        },
        "eplb.expert_distribution": {"get_global_expert_distribution_recorder": lambda: recorder},
    }
    with importing(*SGLANG_ABSENT):
        for name, values in around.items():
            vars(importlib.import_module(f"sglang.srt.{name}")).update(values)
        importlib.import_module("sglang.kernels.ops.quantization.fp8_kernel").sglang_per_token_group_quant_fp8 = cast
        made = importlib.import_module(f"{DISPATCHER}.deepep")
    made.phase, made.resources = phase, resources
    return made


@dataclass
class Batch:
    """What every rank sends: rows [N, H] of bf16, the ids of their experts or -1, and weights, both [N, K]."""

    xs: list[Any]
    idx: list[Any]
    weights: list[Any]


def batch_of(env: Any, sizes: Sizes, seed: int) -> Batch:
    """With tokens that go nowhere; in the third of four one rank sends a single token, in the last one none gets any
    but the first rank."""
    made = Batch([], [], [])
    for rank in range(env.size):
        random = torch.Generator(env.device).manual_seed(1000 * seed + rank)
        count = 1 if seed % 4 == 2 and rank == env.size - 1 else sizes.tokens - 3 * rank
        places = (count, sizes.experts // env.size if seed % 4 == 3 else sizes.experts)
        x = torch.randn((count, sizes.hidden), generator=random, device=env.device).bfloat16()
        idx = torch.rand(places, generator=random, device=env.device).topk(sizes.topk, 1)[1]
        idx[torch.rand(idx.shape, generator=random, device=env.device) < 0.1] = -1
        if count > 1:
            idx[count // 2] = -1
        weights = torch.rand(idx.shape, generator=random, device=env.device)
        for part, value in zip((made.xs, made.idx, made.weights), (x, idx, weights), strict=True):
            part.append(value)
    return made


def values(rows: Any, scales: Any = None) -> Any:
    """fp32 of rows."""
    return rows.float() if scales is None else rows.float() * scales.repeat_interleave(BLOCK, -1)


def same(found: Any, wanted: Any, what: str) -> None:
    """Equal in shape, type and every bit."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), (
        f"{what}: {found.dtype} {tuple(found.shape)}, wanted {wanted.dtype} {tuple(wanted.shape)}"
    )
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    off = (found.contiguous().view(raw) != wanted.contiguous().view(raw)).nonzero()
    assert not len(off), f"{what}: {len(off)} differ, the first at {off[0].tolist()}"


def check_rows(found: tuple[Any, Any], wanted: Any, fp8: bool, what: str) -> None:
    """Rows, and their scales, are those of these tokens."""
    rows, scales = cast(wanted) if fp8 else (wanted, None)
    same(found[0], rows, f"{what}: rows")
    assert (found[1] is None) == (scales is None), f"{what}: scales"
    if fp8:
        same(found[1], scales, f"{what}: scales")


def check_by_expert(env: Any, sizes: Sizes, batch: Batch, found: tuple[Any, Any], counts: Any, fp8: bool) -> None:
    """What came in decode: rows [experts here, rows, H], the first `counts` of each, by rank and token."""
    local = sizes.experts // env.size
    for number in range(local):
        chosen = [(idx == env.rank * local + number).any(1) for idx in batch.idx]
        wanted = torch.cat([x[here] for x, here in zip(batch.xs, chosen, strict=True)])
        name = f"rank {env.rank}, expert {number}"
        assert counts[number] == len(wanted), f"{name}: {counts[number]} rows came, not {len(wanted)}"
        part = [None if one is None else one[number][: len(wanted)] for one in found]
        check_rows((part[0], part[1]), wanted, fp8, name)


def check_by_rank(
    env: Any, sizes: Sizes, batch: Batch, found: tuple[Any, Any], came: tuple[Any, Any, Any], fp8: bool, elsewhere: int
) -> None:
    """What came in prefill: rows, ids of experts here (`elsewhere` for others), weights, and counts by expert."""
    local = sizes.experts // env.size
    here = [(idx >= 0) & (idx // local == env.rank) for idx in batch.idx]
    some = [one.any(1) for one in here]
    name = f"rank {env.rank}"
    check_rows(found, torch.cat([x[one] for x, one in zip(batch.xs, some, strict=True)]), fp8, name)
    mine = torch.cat([one[chosen] for one, chosen in zip(here, some, strict=True)])
    ids = torch.cat([one[chosen] for one, chosen in zip(batch.idx, some, strict=True)])
    weights = torch.cat([one[chosen] for one, chosen in zip(batch.weights, some, strict=True)])
    same(came[0], torch.where(mine, ids, elsewhere), f"{name}: ids")
    same(came[1], torch.where(mine, weights, 0.0), f"{name}: weights")
    wanted = torch.bincount(ids[mine] - env.rank * local, minlength=local).cpu().tolist()
    assert list(came[2]) == wanted, f"{name}: counts {list(came[2])}, not {wanted}"


def check_sums(env: Any, batch: Batch, out: Any, fp8: bool) -> None:
    """Rounded to bf16 for each expert, for each rank and at the end, by 2**-8 at most; and some fp32."""
    x, idx, weights = batch.xs[env.rank], batch.idx[env.rank], batch.weights[env.rank]
    rows = values(*cast(x)) if fp8 else values(x)
    factors = torch.where(idx >= 0, weights * (1.0 + idx), 0.0).sum(1, keepdim=True)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    off = (out.float() - rows * factors).abs() > 2**-6 * rows.abs() * factors + 1e-30
    assert not off.any(), f"rank {env.rank}: {int(off.sum())} sums are wrong, the first at {off.nonzero()[0].tolist()}"


def answers(env: Any, sizes: Sizes, rows: Any, scales: Any) -> Any:
    """The experts' for rows [experts here, rows, H]."""
    local = sizes.experts // env.size
    factors = torch.arange(local, device=env.device) + (1 + env.rank * local)
    return (values(rows, scales) * factors.view(-1, 1, 1)).bfloat16()


def vllm_decode(env: Any, site: str, group: Any, fp8: bool, seed: int, sizes: Sizes) -> None:
    """`deepep_ll`; every second time as a model with shared experts calls it, beside them."""
    engine, batch = vllm(site), batch_of(env, sizes, seed)
    x, idx, weights = batch.xs[env.rank], batch.idx[env.rank], batch.weights[env.rank]
    layer = engine.low_latency(vllm_buffer(env, group, sizes), sizes.tokens, env.size, fp8)
    config = engine.config.make(torch.float8_e4m3fn if fp8 else None, block_shape=[BLOCK, BLOCK] if fp8 else None)
    given = (x, weights, idx, sizes.experts, None, False, config)
    if seed % 2:
        hook, receive = layer.prepare_async(*given)
        hook()
        rows, scales, told, *_ = receive()
    else:
        rows, scales, told, *_ = layer.prepare(*given)
    check_by_expert(env, sizes, batch, (rows, scales), told.expert_num_tokens.tolist(), fp8)
    out = torch.empty_like(x)
    back = (out, answers(env, sizes, rows, scales), weights, idx, False, engine.reduced)
    if seed % 2:
        for step in layer.finalize_async(*back):
            step()
    else:
        layer.finalize(*back)
    check_sums(env, batch, out, fp8)


def vllm_prefill(env: Any, site: str, group: Any, fp8: bool, seed: int, sizes: Sizes) -> None:
    """`deepep_ht`, with sums over a token's experts by vLLM's own class."""
    engine, batch = vllm(site), batch_of(env, sizes, seed)
    x, idx, weights = batch.xs[env.rank], batch.idx[env.rank], batch.weights[env.rank]
    first = env.rank * (sizes.experts // env.size)
    layer = engine.high_throughput(vllm_buffer(env, group), env.size, env.size, first)
    config = engine.config.make(torch.float8_e4m3fn if fp8 else None, block_shape=[BLOCK, BLOCK] if fp8 else None)
    given = (x, weights, idx, sizes.experts, None, False, config)
    rows, scales, told, ids, got = layer.prepare_async(*given)() if seed % 2 else layer.prepare(*given)
    came = (ids, got, told.expert_num_tokens.tolist())
    check_by_rank(env, sizes, batch, (rows, scales), came, fp8, 0 if env.rank else sizes.experts - 1)
    each = (values(rows, scales).unsqueeze(1) * (1 + ids).unsqueeze(2)).bfloat16()
    each = each if len(rows) else torch.empty_like(rows, dtype=torch.bfloat16)  # as vLLM's kernel without tokens
    out = torch.empty_like(x)
    back = (out, each, got, ids, False, engine.reduced)
    if seed % 2:
        layer.finalize_async(*back)()
    else:
        layer.finalize(*back)
    check_sums(env, batch, out, fp8)


def vllm_buffer(env: Any, group: Any, sizes: Sizes | None = None) -> Any:
    """As vLLM's managers make it, for decode where there are sizes."""
    deep_ep = sys.modules["deep_ep"]
    options: dict[str, Any] = {"num_nvl_bytes": 1 << 30, "num_rdma_bytes": 0, "num_qps_per_rank": 1}
    if sizes is not None:
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(sizes.tokens, sizes.hidden, env.size, sizes.experts)
        options |= {"num_rdma_bytes": hint, "num_qps_per_rank": sizes.experts // env.size, "enable_shrink": False}
        options |= {"allow_nvlink_for_low_latency_mode": True, "allow_mnnvl": False}
    name = f"vllm {sizes}"
    if name not in env.keep:
        made = deep_ep.Buffer(group=group, low_latency_mode=sizes is not None, explicitly_destroy=True, **options)
        env.keep[name] = made
    return env.keep[name]


def sglang_layers(env: Any, site: str, group: Any, fp8: bool, seed: int, sizes: Sizes, prefill: bool) -> None:
    """`--moe-a2a-backend deepep --deepep-mode auto`: two micro-batches in flight, a dispatcher each, and one buffer."""
    engine = sglang(site)
    engine.phase.prefill = prefill
    if not hasattr(engine.resources, "buffers"):
        engine.resources.buffers = {}
    kind = {"dispatcher_output_dtype": "fp8" if fp8 else "bf16"}
    batches = [batch_of(env, sizes, seed + half) for half in (0, 100)]
    layers = []
    for _ in batches:
        layer = engine.DeepEPDispatcher(
            group=group,
            router_topk=sizes.topk,
            permute_fusion=True,
            num_experts=sizes.experts,
            num_local_experts=sizes.experts // env.size,
            hidden_size=sizes.hidden,
            params_dtype=torch.bfloat16,
            deepep_mode=engine.DeepEPMode.AUTO,
            async_finish=True,
            return_recv_hook=True,
        )
        layer.set_quant_config(kind)
        layers.append(layer)
    for layer, batch in zip(layers, batches, strict=True):
        chosen = SimpleNamespace(topk_ids=batch.idx[env.rank], topk_weights=batch.weights[env.rank])
        layer.dispatch_a(batch.xs[env.rank], chosen)
    env.keep.setdefault("sglang", engine.DeepEPBuffer._state().buffer)
    given = [layer.dispatch_b() for layer in layers]
    for layer, batch, came in zip(layers, batches, given, strict=True):
        layer.combine_a(sglang_answers(engine, env, sizes, batch, came, fp8))
    for layer, batch in zip(layers, batches, strict=True):
        check_sums(env, batch, layer.combine_b(), fp8)


def sglang_answers(engine: Any, env: Any, sizes: Sizes, batch: Batch, came: Any, fp8: bool) -> Any:
    """The experts' for what a dispatcher gave, which is checked."""
    rows, scales = came.hidden_states, came.hidden_states_scale
    if isinstance(came, engine.DeepEPLLDispatchOutput):
        check_by_expert(env, sizes, batch, (rows, scales), came.masked_m.tolist(), fp8)
        return engine.DeepEPLLCombineInput(answers(env, sizes, rows, scales), came.topk_ids, came.topk_weights)
    ids, weights = came.topk_ids, came.topk_weights
    first = env.rank * (sizes.experts // env.size)
    counted = torch.bincount(ids[ids >= 0], minlength=sizes.experts // env.size).tolist()
    padded = [-(-count // BLOCK) * BLOCK for count in counted]
    assert came.num_recv_tokens_per_expert == padded, f"{came.num_recv_tokens_per_expert}, not {padded}"
    check_by_rank(
        env, sizes, batch, (rows, scales), (torch.where(ids < 0, ids, ids + first), weights, counted), fp8, -1
    )
    factors = torch.where(ids >= 0, weights * (ids + (1 + first)), 0.0).sum(1, keepdim=True)
    return engine.DeepEPNormalCombineInput((values(rows, scales) * factors).bfloat16(), ids, weights)


def sglang_decode(env: Any, site: str, group: Any, fp8: bool, seed: int, sizes: Sizes) -> None:
    """With hooks."""
    sglang_layers(env, site, group, fp8, seed, sizes, prefill=False)


def sglang_prefill(env: Any, site: str, group: Any, fp8: bool, seed: int, sizes: Sizes) -> None:
    """Beside the current stream."""
    sglang_layers(env, site, group, fp8, seed, sizes, prefill=True)


PROGRAMS: dict[str, tuple[Callable[..., None], Sizes]] = {
    "vllm_decode": (vllm_decode, DECODE),
    "vllm_prefill": (vllm_prefill, PREFILL),
    "sglang_decode": (sglang_decode, DECODE),
    "sglang_prefill": (sglang_prefill, PREFILL),
}
KINDS = ("bf16", "fp8")
ROUNDS = 4


def run(env: Any, group: Any, site: str, program: str, kind: str, sizes: Sizes | None = None) -> None:
    """Layers one after the other, through the classes of the engine that `site` has a folder of."""
    work, usual = PROGRAMS[program]
    for seed in range(ROUNDS):
        work(env, site, group, kind == "fp8", seed, sizes or usual)
