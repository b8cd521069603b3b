"""One end of vLLM's own NIXL connector: `vllm_kv.py SITE ROLE PORT REQUESTS`.

SITE is a folder with the published package, where it is found; its worker that pulls runs unchanged, with numpy arrays
as caches. The prefill end answers handshakes as vLLM's scheduler does, and hands out the blocks of every request of
REQUESTS, as `0,1,2`, until each was pulled; the decode end compares every byte of its caches, those of blocks that
nobody asked for included. A request with `!` is one whose prefill end is killed before it is asked for: it must fail,
by its blocks.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import zmq
from absent import importing, package
from surroundings_of_engines import LIMIT_S, Config, until

SITE, ROLE, PORT, REQUESTS = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].split(",")
ABSENT = (
    *("torch", "triton", "cuda", "pynvml", "numba", "flashinfer", "uvloop", "cpuinfo"),
    *("transformers", "huggingface_hub", "tokenizers", "safetensors", "tiktoken", "mistral_common", "gguf"),
    *("pydantic", "pydantic_core", "fastapi", "starlette", "openai", "openai_harmony", "xgrammar", "llguidance"),
    *("PIL", "cbor2", "opentelemetry", "tqdm", "einops", "blake3", "cachetools", "yaml", "compressed_tensors"),
    *("cloudpickle", "partial_json_parser", "depyf", "jinja2", "filelock", "prometheus_client"),
    # What runs models, and the compiled parts.
    *(f"vllm.{name}" for name in ("_C", "model_executor", "models", "compilation", "lora", "third_party")),
    *(f"vllm.{name}" for name in ("config", "inputs", "multimodal", "renderers", "tokenizers", "transformers_utils")),
    *(f"vllm.{name}" for name in ("entrypoints", "outputs", "pooling_params", "sampling_params", "v1.attention")),
)
LAYERS, BLOCKS, TOKENS, HEADS, HEAD_BYTES = 4, 96, 16, 8, 32
"""One block of a layer has keys and values: 16 tokens of 8 heads of 2 x 16 bytes."""
TAKEN = 24
NAMES = tuple(f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS))


class Platform:
    """A machine with host memory only."""

    device_type = "cpu"

    def discover_numa_topology(self) -> list[list[int]]:
        return []

    def get_nixl_supported_devices(self) -> dict[str, tuple[str, ...]]:
        return {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: False if name.startswith("is_") else None


class Cache:
    """As much of a tensor as the worker asks of a cache: [blocks, heads, tokens, bytes], contiguous."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape, self.ndim, self.nbytes = array.shape, array.ndim, array.nbytes

    def __getitem__(self, index: int) -> Cache:
        return Cache(self.array[index])

    def stride(self, axis: int | None = None) -> Any:
        return self.array.strides if axis is None else self.array.strides[axis]

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: self.nbytes)


class Backend:
    """The attention's backend, of which only the name is used."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"


def worker(engine: str, caches: list[Any]) -> tuple[Any, ModuleType]:
    """vLLM's worker for these caches, and its module of metadata."""
    package("vllm", SITE).__version__ = "0.33.0"
    here = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
    with importing(*ABSENT):
        platforms = importlib.import_module("vllm.platforms")
        platforms.current_platform = Platform()
        pull = importlib.import_module(f"{here}.pull_worker")
        base = importlib.import_module(f"{here}.base_worker")
        metadata = importlib.import_module(f"{here}.metadata")
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        hashing = importlib.import_module("vllm.config.utils")
        hashing.hash_factors = lambda factors: repr(sorted(factors.items()))
    # What the model would say.
    base.get_current_attn_backends = lambda _: [Backend]
    base.get_current_attn_backends_and_specs = lambda *_: ([], [])
    base.select_common_block_size = lambda size, *_: size
    base.get_tensor_model_parallel_rank = lambda: 0
    base.get_tensor_model_parallel_world_size = lambda: 1
    page = HEADS * TOKENS * HEAD_BYTES
    spec = interface.FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_BYTES // 2, dtype=None, state_content_bytes=HEAD_BYTES
    )
    if spec.page_size_bytes != page:
        raise AssertionError(f"a page of {spec.page_size_bytes} bytes, not {page}")
    group = interface.KVCacheGroupSpec(list(NAMES), spec)
    config = Config(
        kv_transfer_config=Config(
            get_from_extra_config=lambda _, default: default, kv_buffer_device="cpu", kv_role="kv_both"
        ),
        parallel_config=Config(
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        model_config=Config(
            model="a model",
            use_mla=False,
            get_total_num_kv_heads=lambda: HEADS,
            get_head_size=lambda: HEAD_BYTES // 2,
            get_total_num_hidden_layers=lambda: LAYERS,
        ),
        cache_config=Config(
            block_size=TOKENS, get_resolved_kv_cache_layout=lambda: SimpleNamespace(name="LBHNC"), cache_dtype="fp8"
        ),
        scheduler_config=Config(disable_hybrid_kv_cache_manager=True),
    )
    made = pull.NixlPullConnectorWorker(config, engine, interface.KVCacheConfig(BLOCKS, [], [group]))
    made.register_kv_caches({name: Cache(cache) for name, cache in zip(NAMES, caches, strict=True)})
    return made, metadata


def content() -> list[Any]:
    """What the prefill end has in every layer."""
    random = np.random.default_rng(7)
    return [random.integers(1, 256, (BLOCKS, HEADS, TOKENS, HEAD_BYTES), dtype=np.uint8) for _ in range(LAYERS)]


def blocks_of(request: int) -> tuple[Any, Any]:
    """The blocks that a request has at the prefill end, and those it gets."""
    there = (np.arange(TAKEN) * 5 + request) % BLOCKS
    return there, np.arange(TAKEN)[::-1] + request * TAKEN


def serve(payload: bytes) -> None:
    """Handshakes, as the scheduler's listener answers them."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(f"tcp://127.0.0.1:{PORT}")
    while True:
        identity, _, _ = socket.recv_multipart()
        socket.send_multipart((identity, b"", payload, msgspec.msgpack.encode(time.perf_counter())))


def prefill() -> None:
    """Keeps the blocks of every request until the decode end has them."""
    made, metadata = worker("prefill", content())
    payload = msgspec.msgpack.encode(made.xfer_handshake_metadata)
    threading.Thread(target=serve, args=(payload,), daemon=True).start()
    given = metadata.NixlConnectorMetadata()
    names = {f"prefill-{name}" for name in REQUESTS}
    given.reqs_in_batch |= names
    given.reqs_to_send |= {name: time.perf_counter() + LIMIT_S for name in names}
    made.start_load_kv(given)
    print("ready", flush=True)
    sent: set[str] = set()

    def step() -> bool:
        sent.update(made.get_finished()[0])
        return sent == names

    until(step, "sending")
    print("sent", flush=True)
    sys.stdin.read()


def decode() -> None:
    """Pulls the blocks of every request, and compares all that there is afterwards."""
    buffers = [np.zeros_like(one) for one in content()]
    expected = [np.zeros_like(one) for one in buffers]
    made, metadata = worker("decode", buffers)
    for name in REQUESTS:
        request = int(name.rstrip("!"))
        there, here = blocks_of(request)
        if name.endswith("!"):
            print("ready", flush=True)
            sys.stdin.readline()
        asked = metadata.NixlConnectorMetadata()
        asked.add_new_req_to_recv(
            f"decode-{request}",
            (here.tolist(),),
            {
                "remote_block_ids": (there.tolist(),),
                "remote_engine_id": "prefill",
                "remote_request_id": f"prefill-{request}",
                "remote_host": "127.0.0.1",
                "remote_port": PORT,
                "tp_size": 1,
            },
            awaiting_kvs=True,
        )
        made.start_load_kv(asked)
        results: list[Any] = []

        def step(results: list[Any] = results, wanted: str = f"decode-{request}") -> bool:
            made.start_load_kv(metadata.NixlConnectorMetadata())
            results.append(made.get_transfer_results())
            return wanted in results[-1].finished_recving

        until(step, "receiving")
        failed = results[-1].failed_recving
        if name.endswith("!"):
            if failed != {f"decode-{request}"} or made.get_block_ids_with_load_errors() != set(here.tolist()):
                raise AssertionError(f"the request of a dead peer has not failed by its blocks: {failed}")
            continue
        if failed:
            raise AssertionError(f"{failed} failed")
        for cache, whole in zip(expected, content(), strict=True):
            cache[here] = whole[there]
        for layer, (found, wanted) in enumerate(zip(buffers, expected, strict=True)):
            if not np.array_equal(found, wanted):
                raise AssertionError(f"layer {layer} differs after request {request}")
    print("received", flush=True)


if __name__ == "__main__":
    {"prefill": prefill, "decode": decode}[ROLE]()
    sys.stdout.flush()
    os._exit(0)
